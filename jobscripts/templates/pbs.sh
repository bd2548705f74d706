#% extends "job.sh" %#
#% block about %#
# A PBS Pro or OpenPBS job that trains until it is done: it stops with a checkpoint before its time is
# over, and submits itself again. For Torque replace the line with select by `-l nodes=2:ppn=32`.
# Copy and edit it, or have `hpc-train submit --scheduler pbs` (or torque) write it.
#% endblock %#
#% block begin %#
export HPC_TRAIN_DEADLINE=$(($(date +%s) + walltime))
cd "${PBS_O_WORKDIR:-.}" || exit 2
job=$PBS_JOBID
#% endblock %#
#% block signals %#
# After qdel or qrerun, and at the walltime, PBS sends SIGTERM and soon SIGKILL. The walltime is known by the
# clock, and PBS is asked for the job's state once the ranks have saved. `qsig -s USR1` stops the job earlier,
# and it is submitted again.
#% endblock %#
#% block watch %#
echo "job $PBS_JOBID, start $count, on $(sort -u "$PBS_NODEFILE" | wc -l) nodes"
#% endblock %#
#% block again %#
if [ -n "$task" ]; then # a task of an array is submitted again by itself
    grep -v '^#PBS -[Jt] ' "$script" >"$run_dir/job.sh"
    script=$run_dir/job.sh
fi
spell "$qsub" ${task:+-v "HPC_TRAIN_TASK=$task"} "$script"
#% endblock %#
#% block ask %#
answer=
[ -z "$terminated" ] || answer=$(timeout -s KILL 5 "$qstat" -f "$job" 2>/dev/null)
#= super()|trim =#
field() {
    sed -n "s/^[[:space:]]*$1 = //p" <<<"$answer" | head -n 1
}
time_limit() { # whether SIGTERM came at the walltime; a job that is deleted may stay in state R
    local substate
    substate=$(field substate)
    [ "$terminated" -ge $((HPC_TRAIN_DEADLINE - 15)) ] && [ "$(field job_state) ${substate:-42}" = "R 42" ]
}
#% endblock %#
#% block reasons %#
    elif [ -n "$terminated" ] && [ -z "$(field job_state)" ]; then
        why="SIGTERM came, and PBS does not say why"
    elif [ -n "$terminated" ] && ! time_limit; then
        why="the job was deleted, or PBS queues it again by itself, as qstat tells"
#% endblock %#
#% block queue %#
why="qsub failed"
next=$(timeout -s KILL 60 "$qsub" -v "HPC_TRAIN_QUEUED=$((count + 1)),HPC_TRAIN_TASK=$task" "$script") || next=
#% endblock %#
