#!/bin/bash -l
#SBATCH --job-name=my
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=3
#SBATCH --time=02:00:00
#SBATCH --output=runs/my/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@300
#SBATCH --account=project1
#SBATCH --partition=long
# A SLURM job that trains until it is done: it stops with a checkpoint before its time is over, and
# queues itself again. Copy and edit it, or have `hpc-train submit --scheduler slurm` write it.
run_dir=runs/my
command=(hpc-train train my.yaml --run.steps 100)
start=(hpc-train launch --max_restarts 3 --)
again=requeue
most=50
script=/home/me/runs/my/job.sh
setup() {
    module load python openmpi
}
task=

# The rest need not be changed.
setup
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
count=${HPC_TRAIN_QUEUED:-${SLURM_RESTART_COUNT:-0}}
if [ -e "$run_dir/STOP" ]; then
    echo "$run_dir/STOP is there: nothing is started"
    exit 0
fi
echo "job $SLURM_JOB_ID, start $count, on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"

# SLURM signals this shell; the launcher passes it on to the ranks, which save and exit with 75.
signalled=
trap 'signalled=1; kill -USR1 "$child" 2>/dev/null' USR1 TERM
"${start[@]}" "${command[@]}" &
child=$!
wait "$child"
code=$?
while [ -n "$signalled" ]; do # the signal ended `wait`, not the job
    signalled=
    wait "$child"
    code=$?
done

if [ "$code" -eq 75 ] && [ ! -e "$run_dir/STOP" ]; then
    if [ "$count" -ge "$most" ]; then
        echo "queued again $count times, which is the most: it is not queued again"
    elif [ "$again" = requeue ] && scontrol requeue "$SLURM_JOB_ID"; then
        sleep 60 # SLURM ends this script now
    elif [ "$again" != never ]; then
        HPC_TRAIN_QUEUED=$((count + 1)) sbatch --export=ALL ${task:+--array="$task"} "$script"
    fi
fi
exit "$code"
