#% extends "job.sh" %#
#% block about %#
# An LSF job that trains until it is done: it stops with a checkpoint before its time is over, and
# submits itself again. Copy and edit it, and queue it by `bsub < job.sh`. Or have
# `hpc-train submit --scheduler lsf` write it.
#% endblock %#
#% block begin %#
export HPC_TRAIN_DEADLINE=$(($(date +%s) - SECONDS + walltime)) # the login shell has read the profile before
job=$LSB_JOBID
[ "${LSB_JOBINDEX:-0}" -eq 0 ] || job="${LSB_JOBID}[$LSB_JOBINDEX]" # 0 stands for a job without tasks
#% endblock %#
#% block signals %#
# LSF sends USR1 before the run limit (-wa) and USR2 at it. bkill sends SIGINT, SIGTERM and SIGKILL. The run
# limit is known by the clock, and LSF is asked for the job's state once the ranks have saved.
#% endblock %#
#% block watch %#
echo "job $job, start $count, on $LSB_MCPU_HOSTS"
#% endblock %#
#% block again %#
if [ -n "$task" ]; then # a task of an array is submitted again by itself
    if sed '/^#BSUB -J /s/\[[^]]*\][%0-9]*//' "$script" >|"$run_dir/job.sh"; then
        script=$run_dir/job.sh
    elif [ "$code" -eq 75 ]; then
        why="$script cannot be copied to $run_dir/job.sh, so the task is not queued again: submit once more when it can"
        echo "$why"
        end
    fi
fi
spell env "HPC_TRAIN_TASK=$task" "$bsub"
line+=" < $(printf %q "$script")"
#% endblock %#
#% block ask %#
state=
[ -z "$terminated" ] || state=$(undisturbed 5 "$bjobs" -noheader -o stat "$job" 2>/dev/null) || state=
#= super()|trim =#
#% endblock %#
#% block reasons %#
    elif [ -n "$terminated" ] && [ -z "$state" ]; then
        why="SIGINT or SIGTERM came, and LSF does not say why"
    elif [ -n "$terminated" ] && { [ "$terminated" -lt $((HPC_TRAIN_DEADLINE - 15)) ] || [ "$state" != RUN ]; }; then
        why="the job was ended by bkill, or LSF runs it again by itself"
#% endblock %#
#% block queue %#
why="bsub failed"
queue_by undisturbed 60 env "HPC_TRAIN_QUEUED=$((count + 1))" "HPC_TRAIN_TASK=$task" "$bsub" <"$script"
#% endblock %#
