#!/bin/bash -l
#% if by_hand
#SBATCH --job-name=hpc_train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --threads-per-core=1
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --no-kill
#% endif
#= directives =#
# A SLURM job that trains until it is done: it stops with a checkpoint before its time is over, and
# queues itself again. Copy and edit it, or have `hpc-train submit --scheduler slurm` write it.
#% if by_hand

# Change these.
run_dir=runs/my             # a file STOP in it ends the job for good, after a checkpoint
command=(hpc-train train my.yaml --run.dir "$run_dir")
launcher=(hpc-train launch --max_restarts 3 --)    # or (srun --mpi=pmix --kill-on-bad-exit=1), (mpirun)
requeue_by=requeue          # or submit: a new job; or never
max_requeues=50             # maximum number of requeues
all=$run_dir                # in an array, the run directory of all tasks
script=job.sh               # this file, for requeue_by=submit
task=${SLURM_ARRAY_TASK_ID:-}   # in an array, this task's number; each task has its own run directory
setup() {
    module load python openmpi
    # shellcheck source=/dev/null
    . ~/hpc/bin/activate
}
#% endif
#= settings =#

# The rest need not be changed.
# SLURM signals this shell. The launcher passes the signal on to the ranks, which save and exit with 75.
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
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
count=$((${HPC_TRAIN_QUEUED:-0} + ${SLURM_RESTART_COUNT:-0}))
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
echo "job $SLURM_JOB_ID, start $count, on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"

# With --no-kill a job goes on when SLURM has lost this script's node, and with it the script. The
# job's last node watches: if nothing changes in the run directory any more, it queues the job again.
# If SLURM loses that node, too, the last one of the others takes its place.
watch() {
    while kill -0 $$; do # as long as this script lives
        nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N) || nodes=$SLURM_JOB_NODELIST
        watcher=$(scontrol show hostnames "$nodes" | tail -n 1)
        if [ -z "$watcher" ] || [ "$watcher" = "$SLURMD_NODENAME" ]; then
            return
        fi
        # shellcheck disable=SC2016
        srun --overlap --mpi=none --mem=0 --nodes=1 --ntasks=1 --cpus-per-task=1 --nodelist="$watcher" \
            --output=none --error=none bash -c '
                while sleep "$(($2 / 2))"; do
                    nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N)
                    if [ -n "$nodes" ] && ! scontrol show hostnames "$nodes" | grep -qxF "$1" &&
                        [ -z "$(find "$3" -name .claim -prune -o -newermt "-$2 seconds" -print -quit)" ]; then
                        scontrol requeue "$SLURM_JOB_ID"
                    fi
                done' watch "$SLURMD_NODENAME" "${HPC_TRAIN_SILENCE:-120}" "$run_dir"
        sleep 5
    done
}
if [ "$requeue_by" != never ] && [ "$count" -lt "$max_requeues" ]; then
    watch >/dev/null 2>&1 &
fi

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
        echo "queued again $count times, the maximum: it is not queued again"
    elif [ "$requeue_by" = requeue ] && scontrol requeue "$SLURM_JOB_ID"; then
        sleep 60 # SLURM ends this script meanwhile
    elif [ "$requeue_by" != never ]; then
        unset SLURM_RESTART_COUNT # the new job has its own, which begins with 0
        HPC_TRAIN_QUEUED=$((count + 1)) sbatch --export=ALL ${task:+--array="$task"} "$script"
    fi
fi
exit "$code"
