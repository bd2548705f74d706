#% extends "job.sh" %#
#% block about %#
# A Flux job that trains until it is done: it stops with a checkpoint before its time is over, and
# submits itself again. Copy and edit it, or have `hpc-train submit --scheduler flux` write it.
#% endblock %#
#% block begin %#
export FLUX_F58_FORCE_ASCII=1 # ids without the letter that other programs may not read
own=${FLUX_ENCLOSING_ID:-$("$flux" getattr jobid)}
job=$("$flux" job id --to=f58plain "$own")
unset HPC_TRAIN_DEADLINE # may be that of the job that has queued this one
left=$("$flux" job timeleft 2>/dev/null) || left=
if [ -n "$left" ] && [ "$left" -lt 4294967295 ]; then # this number says that there is no limit
    export HPC_TRAIN_DEADLINE=$(($(date +%s) + left))
fi
#% endblock %#
#% block signals %#
# Flux sends USR1 before the time limit, SIGALRM at it, and SIGTERM after `flux cancel`; SIGHUP may come beside
# them. SIGKILL follows after 5 seconds. The log of the job's events says which it was.
#% endblock %#
#% block watch %#
echo "job $job, start $count, on $("$flux" getattr hostlist)"
#% endblock %#
#% block again %#
spell env "HPC_TRAIN_TASK=$task" "$flux" batch "$script"
#% endblock %#
#% block ask %#
answer=
[ -z "$terminated" ] || answer=$(undisturbed 5 "$flux" --parent job eventlog "$own" 2>/dev/null) || answer=
#= super()|trim =#
#% endblock %#
#% block reasons %#
    elif [ -n "$terminated" ] && [ -z "$answer" ]; then
        why="a signal came, and Flux does not say why"
    elif [ -n "$terminated" ] && [[ $answer == *'type="cancel"'* ]]; then
        why="the job was cancelled"
    elif [ -n "$terminated" ] && [[ $answer != *'type="timeout"'* ]]; then
        why="a signal came, but not for the time limit"
#% endblock %#
#% block queue %#
why="flux batch failed"
queue_by undisturbed 60 env "HPC_TRAIN_QUEUED=$((count + 1))" "HPC_TRAIN_TASK=$task" "$flux" --parent batch "$script"
#% endblock %#
