#!/bin/bash -l
#BSUB -J my
#BSUB -n 24
#BSUB -R "span[ptile=6]"
#BSUB -W 2:00
#BSUB -o runs/my/my-%J.out
#BSUB -r
#BSUB -wa USR1
#BSUB -wt 5
#BSUB -P project1
#BSUB -q long
# An LSF job that trains until it is done: it stops with a checkpoint before its time is over, and
# submits itself again. Copy and edit it, and queue it by `bsub < job.sh`. Or have
# `hpc-train submit --scheduler lsf` write it.

# Change these.
# The run directory of the configuration. A file STOP in it ends the job for good.
run_dir=runs/my
all=$run_dir
# What runs on each rank, and the launcher's words before it.
command=(hpc-train train my.yaml --run.steps 100)
launcher=(hpc-train launch --max_restarts 3 --)
# How the job is queued again when it has stopped early: submit or never.
requeue_by=submit
# The maximum number of requeues.
max_requeues=50
# This file.
script=/home/me/runs/my/job.sh
# The scheduler's commands; a job's PATH may lack them.
bsub='bsub'
bjobs='bjobs'
# Seconds before the end at which USR1 comes; nothing if it is to stop the job.
notice=
# Seconds, as in the directive -W.
walltime=7200
export OMP_NUM_THREADS=3
setup() {
    module load python openmpi || return
}
task=

# The rest need not be changed.
for name in bsub bjobs; do
    [ -x "${!name}" ] || printf -v "$name" %s "$name"
done
export HPC_TRAIN_DEADLINE=$(($(date +%s) - SECONDS + walltime)) # the login shell has read the profile before
job=$LSB_JOBID
[ "${LSB_JOBINDEX:-0}" -eq 0 ] || job="${LSB_JOBID}[$LSB_JOBINDEX]" # 0 stands for a job without tasks
# LSF sends USR1 before the run limit (-wa) and USR2 at it. bkill sends SIGINT, SIGTERM and SIGKILL. The run
# limit is known by the clock, and LSF is asked for the job's state once the ranks have saved.
signalled=
terminated= # when a signal came that may end the job for good, in seconds since 1970
child=
pass_on() { # SIGNAL
    if [ "$1" = USR1 ] && [ -n "$notice" ] && [ -n "$HPC_TRAIN_DEADLINE" ] &&
        [ "$(date +%s)" -ge $((HPC_TRAIN_DEADLINE - notice - 60)) ]; then
        return # the training knows the job's end, and stops by itself in time
    fi
    case $1 in USR1 | USR2) ;; *) [ -n "$terminated" ] || printf -v terminated '%(%s)T' -1 ;; esac
    signalled=1
    waiting=1
    [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null
}
for name in USR1 USR2 INT TERM; do
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
own_names+=(bsub bjobs)
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
echo "job $job, start $count, on $LSB_MCPU_HOSTS"

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
if [ "$code" -eq 0 ]; then
    end
fi

undisturbed() { # SECONDS COMMAND: a signal to all processes of the job does not end it
    # `timeout` has its command take signals that this shell ignores.
    timeout -s KILL "$1" bash -c 'trap "" USR1 USR2 INT TERM; exec "$@"' - "${@:2}"
}
state=
[ -z "$terminated" ] || state=$(undisturbed 5 "$bjobs" -noheader -o stat "$job" 2>/dev/null) || state=
trap '' USR1 USR2 INT TERM # the next commands are not interrupted
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
    elif [ -n "$terminated" ] && [ -z "$state" ]; then
        why="SIGINT or SIGTERM came, and LSF does not say why"
    elif [ -n "$terminated" ] && { [ "$terminated" -lt $((HPC_TRAIN_DEADLINE - 15)) ] || [ "$state" != RUN ]; }; then
        why="the job was ended by bkill, or LSF runs it again by itself"
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
        next=$(sed -En 's|^(.*Job <)([0-9]+)> is submitted to .*queue.*$|\2|p' <<<"$answer" | tail -n 1)
        [ -n "$next" ] || uncertain "no job id was told" "$answer"
    elif [ "$failed" -eq 124 ] || [ "$failed" -eq 137 ]; then # `timeout` has ended it
        uncertain "no answer came" "$answer"
    fi
}
why="bsub failed"
queue_by undisturbed 60 env "HPC_TRAIN_QUEUED=$((count + 1))" "HPC_TRAIN_TASK=$task" "$bsub" <"$script"
if [ -n "$next" ]; then
    why=
    resume_by=
    code=0
    echo "queued again: job $next"
fi
end
