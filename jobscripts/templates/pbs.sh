#% extends "job.sh" %#
#% block about %#
# A PBS Pro or OpenPBS job that trains until it is done: it stops with a checkpoint before its time is
# over, and submits itself again. Copy and edit it, or have `hpc-train submit --scheduler pbs` (or torque)
# write it. Torque has `-l nodes=2:ppn=32` in place of the lines with select and place, and no `-k doe`.
#% endblock %#
#% block begin %#
export HPC_TRAIN_DEADLINE=$(($(date +%s) - SECONDS + walltime)) # the login shell has read the profile before
cd "${PBS_O_WORKDIR:-.}" || exit 2
job=$PBS_JOBID
#% endblock %#
#% block signals %#
# After qdel, and at the walltime, PBS sends SIGTERM and soon SIGKILL. At the walltime it first writes so into the
# job's output. PBS is asked for the job's state once the ranks have saved.
#% endblock %#
#% block watch %#
echo "job $PBS_JOBID, start $count, on $(sort -u "$PBS_NODEFILE" | wc -l) nodes"
#% endblock %#
#% block again %#
if [ -n "$task" ]; then # a task of an array is submitted again by itself
    if grep -v '^#PBS -[Jt] ' "$script" >|"$run_dir/job.sh"; then
        script=$run_dir/job.sh
    elif [ "$code" -eq 75 ]; then
        why="$script cannot be copied to $run_dir/job.sh, so the task is not queued again: submit once more when it can"
        echo "$why"
        end
    fi
fi
# The option -v replaces these directives.
given=$(sed -n 's/^#PBS  *-v *//p' "$script" | sed 's/^"\(.*\)"$/\1/' | paste -sd, -)
given=${given:+,$given}
spell "$qsub" ${task:+-v "HPC_TRAIN_TASK=$task$given"} "$script"
#% endblock %#
#% block ask %#
#= super()|trim =#
reason= # why a job that got SIGTERM is not queued again
walltime_over() { # whether PBS has written into the output that the walltime is over
    [ -f "/proc/$$/fd/2" ] && tail -c 1000000 "/proc/$$/fd/2" | grep -q 'PBS: job killed: walltime'
}
ask() {
    local answer state substate
    answer=$(undisturbed 5 "$qstat" -f "$job" 2>/dev/null)
    state=$(sed -n 's/^[[:space:]]*job_state = //p' <<<"$answer")
    substate=$(sed -n 's/^[[:space:]]*substate = //p' <<<"$answer")
    if [ -z "$state" ]; then
        reason="SIGTERM came, and PBS does not say why"
    elif [[ $substate == 6? ]]; then
        reason="PBS runs the job again by itself"
        resume_by=
    elif [ "$state ${substate:-42}" != "R 42" ] || ! walltime_over; then
        reason="the job was deleted"
    fi
}
#% endblock %#
#% block reasons %#
    elif [ -n "$terminated" ]; then
        ask
        why=$reason
#% endblock %#
#% block queue %#
why="qsub failed"
terminated=
trap 'terminated=1' TERM
# shellcheck disable=SC2329
submit() { # PBS signals all processes of a job
    trap '' TERM
    undisturbed 60 "$qsub" -v "HPC_TRAIN_QUEUED=$((count + 1)),HPC_TRAIN_TASK=$task$given" "$script"
}
queue_by submit
trap '' TERM
if [ -n "$terminated" ] && [ -n "$next" ] && ask && [ -n "$reason" ] && undisturbed 5 "$qdel" "$next"; then
    why=$reason
    next=
fi
#% endblock %#
