#!/bin/bash -l
#% if by_hand
#PBS -N hpc_train
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -r y
#% endif
#= directives =#
# A PBS Pro or OpenPBS job that trains until it is done: it stops with a checkpoint before its time is
# over, and submits itself again. For Torque replace the line with select by `-l nodes=2:ppn=4`.
# Copy and edit it, or have `hpc-train submit --scheduler pbs` (or torque) write it.
#% if by_hand

# Change these.
run_dir=runs/my             # a file STOP in it ends the job for good, after a checkpoint
command=(hpc-train train my.yaml --run.dir "$run_dir")
launcher=(hpc-train launch --max_restarts 3 --)    # or the mpiexec line of your site
walltime=7200               # seconds, as above; PBS sends no early signal and does not say how much time is left
requeue_by=submit           # or never
max_requeues=50             # maximum number of requeues
all=$run_dir                # in an array, the run directory of all tasks
script=job.sh               # this file
task=${HPC_TRAIN_TASK:-${PBS_ARRAY_INDEX:-}}    # in an array, this task's number; each task has its own run directory
setup() {
    module load python openmpi
    # shellcheck source=/dev/null
    . ~/hpc/bin/activate
}
#% endif
#= settings =#

# The rest need not be changed.
export HPC_TRAIN_DEADLINE=$(($(date +%s) + walltime))
cd "${PBS_O_WORKDIR:-.}" || exit 2
# At the job's end, or after qdel, PBS sends SIGTERM and soon SIGKILL. `qsig -s USR1` stops it earlier.
signalled=
child=
pass_on() {
    signalled=1
    waiting=1
    [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null
}
trap pass_on USR1 TERM
if ! setup; then
    echo "the setup failed: nothing is started"
    exit 1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
count=${HPC_TRAIN_QUEUED:-0}
stopped() {
    for stop in "$run_dir/STOP" "$all/STOP"; do
        [ ! -e "$stop" ] || return 0
    done
    return 1
}
if stopped; then
    echo "$stop is there: nothing is started"
    exit 0
fi
echo "job $PBS_JOBID, start $count, on $(sort -u "$PBS_NODEFILE" | wc -l) nodes"

code=75
if [ -z "$signalled" ]; then
    "${launcher[@]}" "${command[@]}" &
    sleep 0.2 # the child first drops this shell's traps; a signal before that would be lost
    child=$!
    [ -z "$signalled" ] || pass_on # the signal came before there was a child
    waiting=1
    while [ -n "$waiting" ]; do # a signal ends `wait`, not the job
        waiting=
        wait "$child"
        code=$?
    done
    if [ -n "$signalled" ] && [ "$code" -eq 138 ]; then
        code=75 # the signal ended a program that was not listening yet
    fi
fi

if [ "$code" -eq 75 ] && ! stopped; then
    if [ "$count" -ge "$max_requeues" ]; then
        echo "submitted again $count times, the maximum: it is not submitted again"
    elif [ "$requeue_by" != never ]; then
        if [ -n "$task" ]; then # a task of an array is submitted again by itself
            grep -v '^#PBS -[Jt] ' "$script" > "$run_dir/job.sh"
            script=$run_dir/job.sh
        fi
        qsub -v "HPC_TRAIN_QUEUED=$((count + 1)),HPC_TRAIN_TASK=$task" "$script"
    fi
fi
exit "$code"
