#% extends "job.sh" %#
#% block about %#
# A SLURM job that trains until it is done: it stops with a checkpoint before its time is over, and
# queues itself again. Copy and edit it, or have `hpc-train submit --scheduler slurm` write it.
# With srun or mpirun as the launcher, leave out --no-kill and set no_kill to nothing.
#% endblock %#
#% block begin %#
job=$SLURM_JOB_ID
if [ -n "$task" ] && [ -n "$SLURM_ARRAY_JOB_ID" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one task's SLURM_JOB_ID stands for the whole array
fi
#% endblock %#
#% block signals %#
unset HPC_TRAIN_DEADLINE # may be that of the job that has queued this one
exported=${SLURM_EXPORT_ENV:-ALL} # what `sbatch --export` has named for this job
export SLURM_EXPORT_ENV=ALL       # srun would pass only the same to the ranks
case $exported in # the same for the next job, and what that one has to know
    ALL | ALL,*) exported=ALL ;;
    NONE | NIL) exported=HPC_TRAIN_QUEUED ;;
    *) # names alone: values may be secrets, and are in the environment by now
        exported=$(sed 's/="[^"]*"//g; s/=[^,]*//g' <<<"$exported")
        [[ $exported == *HPC_TRAIN_QUEUED ]] || exported+=,HPC_TRAIN_QUEUED
        ;;
esac
if [ -z "$SLURM_JOB_END_TIME" ]; then # only newer SLURMs set it
    SLURM_JOB_END_TIME=$(timeout 20 "$squeue" -h -j "$job" -o %e 2>/dev/null)
    SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:+$(date +%s -d "$SLURM_JOB_END_TIME" 2>/dev/null)}
fi
#% if staging %#
# The copies are removed before the job's end.
[ -z "$SLURM_JOB_END_TIME" ] || export HPC_TRAIN_DEADLINE=$((SLURM_JOB_END_TIME - 10))
#% else %#
[ -z "$SLURM_JOB_END_TIME" ] || export HPC_TRAIN_DEADLINE=$SLURM_JOB_END_TIME
#% endif %#
# SLURM signals this shell. The launcher passes the signal on to the ranks, which save and exit with 75.
# USR1 comes before the time limit. SIGTERM comes when the job is cancelled, preempted or requeued, and
# at the time limit. Only SLURM knows which: it is asked once the ranks have saved.
#% endblock %#
#% block threads %#
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
#% endblock %#
#% block count %#
count=$((${HPC_TRAIN_QUEUED:-0} + ${SLURM_RESTART_COUNT:-0})) # how often the job was queued again
#% endblock %#
#% block watch %#
echo "job $SLURM_JOB_ID, start $count, on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"

# With --no-kill a job goes on when SLURM has lost this script's node, and with it the script. The
# job's last node watches: if nothing changes in the run directory any more, it queues the job again.
# If SLURM loses that node, too, the last one of the others takes its place.
watch() {
    pause=5
    while kill -0 $$; do # as long as this script lives
        nodes=$("$squeue" -h -j "$job" -o %N) || nodes=$SLURM_JOB_NODELIST
        watcher=$("$scontrol" show hostnames "$nodes" | tail -n 1)
        if [ -z "$watcher" ] || [ "$watcher" = "$SLURMD_NODENAME" ]; then
            return
        fi
        SECONDS=0
        # shellcheck disable=SC2016
        srun --overlap --mpi=none --mem=0 --nodes=1 --ntasks=1 --cpus-per-task=1 --nodelist="$watcher" \
            --output=none --error=none bash -c '
                while sleep "$(($2 / 2))"; do
                    # SLURM is asked only if the directory is silent.
                    if [ -z "$(find "$3" -name .claim -prune -o -newermt "-$2 seconds" -print -quit)" ] &&
                        nodes=$("$4" -h -j "$6" -o %N) && [ -n "$nodes" ] &&
                        ! "$5" show hostnames "$nodes" | grep -qxF "$1"; then
                        "$5" requeue "$6"
                    fi
                done' watch "$SLURMD_NODENAME" "${HPC_TRAIN_SILENCE:-120}" "$run_dir" "$squeue" "$scontrol" "$job"
        # An srun that cannot start would otherwise ask SLURM each 5 seconds for the whole job.
        [ "$SECONDS" -lt 60 ] || pause=5
        sleep "$pause"
        pause=$((pause < 150 ? 2 * pause : 300))
    done
}
if [ -n "$no_kill" ] && [ "$requeue_by" != never ] && [ "$count" -lt "$max_requeues" ]; then
    watch >/dev/null 2>&1 &
fi
#% endblock %#
#% block left_alone %#
    # SLURM may start no step now. If none waits for it, this script removes what it can.
    if [ -n "$remover" ] && [ -n "$terminated" ]; then
        [ -d "$copies" ] && [ ! -e "$copies/.remover_waits" ] || return
    fi
#% endblock %#
#% block remover %#
        # SLURM starts no step while it ends a job. This one waits on each node, and removes the copy then.
        env -u SLURM_GPUS -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK -u SLURM_NTASKS_PER_GPU \
            srun --overlap --mpi=none --mem=0 --gres=none --no-kill --nodes="$SLURM_JOB_NUM_NODES" \
            --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 \
            --output=none --error=none "$copies/remove_at_end" >/dev/null 2>&1 &
        remover=$!
#% endblock %#
#% block again %#
again_by=("$sbatch" --export="$exported" ${task:+--array="$task"} "$script")
spell "${again_by[@]}"
#% endblock %#
#% block ask %#
# SLURM's answer says whether the job is being cancelled, or comes back without this script.
ask() { answer=$(undisturbed 5 "$scontrol" show job --oneliner "$job" 2>/dev/null); }
ask
#= super()|trim =#
field() {
    local rest=" $answer"
    case $rest in *" $1="*)
        rest=${rest#*" $1="}
        echo "${rest%% *}"
        ;;
    esac
}
requeued() { [ "$(field Restarts)" -gt "${SLURM_RESTART_COUNT:-0}" ] 2>/dev/null; }
state=$(field JobState)
preempted=$(field PreemptTime)
if requeued; then
    why="SLURM has queued the job again"
    end
elif [ "$state" = RUNNING ] && [ "${preempted:-None}" != None ]; then
    # The grace time of a preemption: SLURM brings back only a job that has not ended by itself, and none under
    # PreemptMode=CANCEL.
    why="the job is preempted, and SLURM may queue it again. If it does not come back, continue by: $line"
    echo "$why"
    trap 'kill $!; end' TERM
    sleep infinity &
    wait $!
    end
fi
#% endblock %#
#% block reasons %#
    elif [ -z "$state" ] && [ -n "$terminated" ]; then
        why="SIGTERM came, and SLURM does not say why"
    elif [ -n "$state" ] && [ "$state" != RUNNING ] && [ "$(field Reason)" != TimeLimit ]; then
        why="the job was cancelled"
    elif [ "$state" = RUNNING ] && [ -n "$terminated" ]; then
        why="SIGTERM came, but not from SLURM"
#% endblock %#
#% block queue %#
# A job that SLURM may queue again by itself is queued again by SLURM alone: a new one could be a second.
if [ "$requeue_by" = requeue ] && [ "$(field Requeue)" != 0 ]; then
    why="\`scontrol requeue\` failed"
#% if staging %#
    # `scontrol requeue` ends this script at once, and so does SLURM soon after the time limit.
    left=$((${SLURM_JOB_END_TIME:-0} - $(date +%s)))
    remove_copies $((left < 10 ? 10 : left > 60 ? 60 : left))
#% endif %#
    undisturbed 60 "$scontrol" requeue "$job"
    failed=$?
    if [ "$failed" -eq 0 ]; then
        next=$job
    else # a busy SLURM may have done it without an answer
        ask
        if requeued; then
            next=$job
        elif [ "$failed" -eq 137 ]; then # `timeout` has ended the command
            uncertain "no answer came"
        fi
    fi
else
    why="sbatch failed"
    unset SLURM_RESTART_COUNT # the new job has its own, which begins with 0
    queue_by undisturbed 60 env HPC_TRAIN_QUEUED=$((count + 1)) "$sbatch" --parsable "${again_by[@]:1}"
fi
#% endblock %#
