#!/bin/bash -l
#PBS -N hpc_train
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -k doe
#PBS -r y
#PBS -l place=scatter
# A PBS Pro or OpenPBS job that trains until it is done: it stops with a checkpoint before its time is
# over, and submits itself again. Copy and edit it, or have `hpc-train submit --scheduler pbs` (or torque)
# write it. Torque has `-l nodes=2:ppn=32` in place of the lines with select and place, and no `-k doe`.

# Change these.
# The run directory of the configuration. A file STOP in it ends the job for good.
run_dir=runs/my
all=$run_dir
# What runs on each rank, and the launcher's words before it.
command=(hpc-train train my.yaml)
launcher=(hpc-train launch --max_restarts 3 --)
# How the job is queued again when it has stopped early: submit or never.
requeue_by=submit
# The maximum number of requeues.
max_requeues=50
# This file.
script=job.sh
# The scheduler's commands; a job's PATH may lack them.
qsub='qsub'
qstat='qstat'
qdel='qdel'
notice=
# Seconds, as in the directive. PBS sends no early signal.
walltime=7200
export OMP_NUM_THREADS=8
setup() {
    module load python openmpi || return
    # shellcheck source=/dev/null
    . ~/hpc/bin/activate || return
}
task=

# The rest need not be changed.
for name in qsub qstat qdel; do
    [ -x "${!name}" ] || printf -v "$name" %s "$name"
done
export HPC_TRAIN_DEADLINE=$(($(date +%s) - SECONDS + walltime)) # the login shell has read the profile before
cd "${PBS_O_WORKDIR:-.}" || exit 2
job=$PBS_JOBID
# After qdel, and at the walltime, PBS sends SIGTERM and soon SIGKILL. At the walltime it first writes so into the
# job's output. PBS is asked for the job's state once the ranks have saved.
signalled=
terminated= # when a signal came that may end the job for good, in seconds since 1970
child=
pass_on() { # SIGNAL
    if [ "$1" = USR1 ] && [ -n "$notice" ] && [ -n "$HPC_TRAIN_DEADLINE" ] &&
        [ "$(date +%s)" -ge $((HPC_TRAIN_DEADLINE - notice - 60)) ]; then
        return # the training knows the job's end, and stops by itself in time
    fi
    case $1 in USR1) ;; *) [ -n "$terminated" ] || printf -v terminated '%(%s)T' -1 ;; esac
    signalled=1
    waiting=1
    [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null
}
for name in USR1 TERM; do
    # shellcheck disable=SC2064
    trap "pass_on $name" "$name"
done
mkdir -p "$run_dir"
line=     # the command that continues
stalled=0 # number of jobs in a row that ended without a newer checkpoint
next=
why=
resume_by=
end() { # note how the job ends, and end it
    if [ -n "$resume_by" ]; then
        echo "$why: it is not queued again. To continue: $resume_by"
    fi
    local text=("$job" "$next" "$why" "$resume_by")
    text=("${text[@]//[[:cntrl:]]/ }")
    text=("${text[@]//\\/\\\\}")
    text=("${text[@]//\"/\\\"}")
    [ -z "$(tail -c 1 "$run_dir/jobs.jsonl" 2>/dev/null)" ] || echo >>"$run_dir/jobs.jsonl" # after half a line
    printf '{"time": %s, "event": "ended", "job": "%s", "code": %s, "stalled": %s, "next": "%s", "why": "%s", "continue": "%s"}\n' \
        "$(date +%s)" "${text[0]}" "$code" "$stalled" "${text[@]:1}" >>"$run_dir/jobs.jsonl"
    exit "$code"
}
fail() { # WHAT HAS FAILED
    code=1
    why="the $1 failed"
    echo "$why: nothing is started"
    end
}
# The setup may use names of this script for variables of its own, and may change the folder. The script keeps its
# values and its folder. The program starts in the setup's folder, with all variables that the setup exports. The
# setup may change settings of this script: those of own_settings, if it does not export them.
own_folder=$PWD
own_names=(run_dir all command launcher stage stage_launcher environment requeue_by max_requeues script notice no_kill
    walltime output task job own child line stalled next why resume_by count code stop copies before waiting name
    exported starter)
own_settings=" command launcher requeue_by max_requeues notice no_kill "
own_names+=(qsub qstat qdel)
own_values=$(
    declare -p "${own_names[@]}" 2>/dev/null
    declare -f end fail pass_on
)
own_exports=() # those that the program would not see, as they have names of this script
trap 'trap - ERR EXIT; set +eu; cd "$own_folder"; eval "$own_values"; fail setup' EXIT # the setup may call exit
set -E
trap '[ -z "$signalled" ] || set +e' ERR # a signal to the job ends a command of the setup, too
setup
own_code=$?
set +eEu +o pipefail # the rest looks at exit codes by itself
[[ $(trap -p ERR) != *signalled* ]] || trap - ERR
[[ $(trap -p EXIT) != *"fail setup"* ]] || trap - EXIT # not a trap of the setup
for own_name in "${own_names[@]}"; do
    own_set=$(declare -p "$own_name" 2>/dev/null)
    IFS=' ' read -r _ own_flags _ <<<"$own_set"
    if [[ $own_flags == *x* ]]; then
        own_exports+=("$own_name=${!own_name}")
    elif [[ $own_settings == *" $own_name "* ]]; then
        own_values+=$'\n'$own_set
    fi
done
unset -v "${own_names[@]}"
eval "$own_values"
code=$own_code
own_start=$PWD
cd "$own_folder" || fail "return to $own_folder"
own_dirs=("$run_dir")
if [ "$own_start" != "$own_folder" ] && [[ $run_dir != /* ]]; then
    own_dirs+=("$own_start/$run_dir")
    echo "the setup has changed the folder: \"$run_dir\" is in $own_folder for this script, and in $own_start for the program"
fi
if [ "$code" -ne 0 ] && [ -z "$signalled" ]; then
    fail setup
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
count=${HPC_TRAIN_QUEUED:-0} # how often the job was queued again
stopped() {
    for stop in "$run_dir/STOP" "$all/STOP"; do
        [ ! -e "$stop" ] || return 0
    done
    return 1
}
if stopped; then
    code=75
    why="$stop is there"
    echo "$why: nothing is started"
    end
fi
echo "job $PBS_JOBID, start $count, on $(sort -u "$PBS_NODEFILE" | wc -l) nodes"

newest() { # the newest checkpoint: its name has the step; the files of other programs have their time
    { # those of a `Loop` are in the run directory itself
        find "${own_dirs[@]}" -maxdepth 1 -type f -name 'step-[0-9]*.safetensors' -printf '%f\n'
        find "${own_dirs[@]/%//checkpoints}" -type f ! -name '.*' ! -name LATEST \
            \( -name 'step-*' -printf '%f\n' -o -printf '%T@ %f\n' \)
    } 2>/dev/null | LC_ALL=C sort | tail -n 1
}
before=$(newest)
code=75
if [ -z "$signalled" ]; then
    cd "$own_start" || fail "change to $own_start"
    ${own_exports[0]:+env} "${own_exports[@]}" "${launcher[@]}" "${command[@]}" &
    # shellcheck disable=SC2164
    cd "$own_folder"
    sleep 0.2 # the child first drops this shell's traps; a signal before that would be lost
    child=$!
    [ -z "$signalled" ] || pass_on USR1 # the signal came before there was a child
    waiting=1
    while [ -n "$waiting" ]; do # a signal ends `wait`, not the job
        waiting=
        wait "$child"
        code=$?
    done
    if [ -n "$signalled" ] && [ "$code" -eq 138 ]; then
        code=75 # the signal ended a program that was not listening yet
    fi
    if [ "$code" -eq 2 ] && stopped; then
        code=75 # a training that finds STOP as it starts refuses with 2
    fi
fi

if [ "$(newest)" = "$before" ]; then
    [ "$count" -eq 0 ] || stalled=$(tail -qn 1 "$run_dir/jobs.jsonl" 2>/dev/null | sed -n 's/.*"stalled": \([0-9]*\),.*/\1/p')
    stalled=$((stalled + 1))
fi
spell() { # COMMAND
    line="cd $(printf %q "$PWD") &&$(printf ' %q' "$@")"
}
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
if [ "$code" -eq 0 ]; then
    end
fi

undisturbed() { # SECONDS COMMAND: a signal to all processes of the job does not end it
    # `timeout` has its command take signals that this shell ignores.
    timeout -s KILL "$1" bash -c 'trap "" USR1 TERM; exec "$@"' - "${@:2}"
}
trap '' USR1 TERM # the next commands are not interrupted
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
if [ "$code" -ne 75 ]; then
    why="exit code $code"
elif stopped; then
    why="$stop is there"
elif [ "$requeue_by" = never ]; then
    why="requeue_by is never"
else
    resume_by=$line
    if [ "$count" -ge "$max_requeues" ]; then
        why="queued again $count times, the maximum"
    elif [ "$stalled" -ge 3 ]; then
        why="$stalled jobs have ended without a newer checkpoint"
    elif [ -n "$terminated" ]; then
        ask
        why=$reason
    fi
fi
[ -z "$why" ] || end

uncertain() { # WHY [ANSWER]
    why="$1, so look whether the job is in the queue${2:+: $2}"
    resume_by= # it could be a second job
    echo "$why"
    echo "If it is not in the queue, continue by: $line"
}
queue_by() { # COMMAND that queues the job: set next to the new job's id
    local answer failed
    answer=$("$@")
    failed=$?
    if [ "$failed" -eq 0 ]; then
        next=$(sed -En 's|^()([0-9]+(\[\])?([.][^ ]+)?)$|\2|p' <<<"$answer" | tail -n 1)
        [ -n "$next" ] || uncertain "no job id was told" "$answer"
    elif [ "$failed" -eq 124 ] || [ "$failed" -eq 137 ]; then # `timeout` has ended it
        uncertain "no answer came" "$answer"
    fi
}
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
if [ -n "$next" ]; then
    why=
    resume_by=
    code=0
    echo "queued again: job $next"
fi
end
