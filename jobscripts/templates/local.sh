#% extends "job.sh" %#
#% block about %#
# A job on this machine, without a scheduler, that trains until it is done: it stops with a checkpoint
# before its time is over, and starts again. `hpc-train submit --scheduler local` starts it.
#% endblock %#
#% block begin %#
export HPC_TRAIN_DEADLINE=$(($(date +%s) + walltime))
if ! declare -F module >/dev/null && [ -r "$MODULESHOME/init/bash" ]; then # `submit` was not called from bash
    # shellcheck source=/dev/null
    . "$MODULESHOME/init/bash"
fi
name_of() { # PROCESS: its id, the time of its start in the kernel's ticks, and this host
    local fields
    read -ra fields <"/proc/$1/stat" && echo "$1-${fields[21]}@$(</proc/sys/kernel/hostname)"
}
job=$$
if [ "$(<"/proc/$PPID/comm")" = timeout ]; then # else somebody has started this script by hand
    job=$PPID # it ends this script at its time limit
fi
job=$(name_of "$job")
export HPC_TRAIN_LOCAL_JOB=$job
#% endblock %#
#% block signals %#
# `timeout` sends SIGTERM at the time limit, and `hpc-train cancel --now` sends it at any time. SIGKILL follows
# after 30 seconds. The time limit is known by the clock.
#% endblock %#
#% block watch %#
echo "job $job, start $count"
#% endblock %#
#% block again %#
spell env "HPC_TRAIN_TASK=$task" bash "$script"
#% endblock %#
#% block reasons %#
    elif [ -n "$terminated" ] && [ "$terminated" -lt $((HPC_TRAIN_DEADLINE - 1)) ]; then
        why="the job was cancelled"
#% endblock %#
#% block queue %#
why="the job could not start again"
HPC_TRAIN_QUEUED=$((count + 1)) HPC_TRAIN_TASK=$task \
    setsid timeout --signal=TERM --kill-after=30 "$walltime" "${starter[@]}" "$script" >>"$output" 2>&1 </dev/null &
next=$(name_of $!)
#% endblock %#
