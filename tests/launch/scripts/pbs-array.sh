#!/bin/bash -l
#PBS -N my
#PBS -l select=4:ncpus=6:mpiprocs=2:ompthreads=3
#PBS -l walltime=02:00:00
#PBS -o runs/my/
#PBS -j oe
#PBS -r y
#PBS -A project1
#PBS -q long
#PBS -J 0-1
# A PBS Pro or OpenPBS job that trains until it is done: it stops with a checkpoint before its time is
# over, and submits itself again. For Torque replace the line with select by `-l nodes=2:ppn=4`.
# Copy and edit it, or have `hpc-train submit --scheduler pbs` (or torque) write it.
run_dir=runs/my
all=$run_dir
command=(hpc-train train my.yaml --run.steps 100)
launcher=(hpc-train launch --max_restarts 3 --)
requeue_by=submit
max_requeues=50
script=/home/me/runs/my/job.sh
walltime=7200
export OMP_NUM_THREADS=3
setup() {
    module load python openmpi
}
task=${HPC_TRAIN_TASK:-$PBS_ARRAY_INDEX}
case "$task" in
    0) command+=(--run.seed 1) ;;
    1) command+=(--run.seed 2) ;;
esac
run_dir+="/task-$task"
command+=(--run.dir "$run_dir")

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
