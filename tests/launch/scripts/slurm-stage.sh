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
# With srun or mpirun as the launcher, leave out --no-kill and set no_kill to nothing.

# Change these.
# The run directory of the configuration. A file STOP in it ends the job for good.
run_dir=runs/my
all=$run_dir
# What runs on each rank, and the launcher's words before it.
command=(hpc-train train my.yaml --run.steps 100)
launcher=(hpc-train launch --max_restarts 3 --)
# What copies the environment to the nodes' disks, and the launcher's words before it.
# shellcheck disable=SC2016
stage=(/home/me/venv/bin/python -m hpc_train stage --to '$LOCAL_DISK')
stage_launcher=(srun --nodes 4 --ntasks 4 --ntasks-per-node=1)
environment=/home/me/venv
# How the job is queued again when it has stopped early: requeue, submit or never.
requeue_by=requeue
# The maximum number of requeues.
max_requeues=50
# This file.
script=/home/me/runs/my/job.sh
# The scheduler's commands; a job's PATH may lack them.
sbatch='sbatch'
scontrol='scontrol'
squeue='squeue'
# Seconds before the end at which USR1 comes; nothing if it is to stop the job.
notice=
# Whether the directive --no-kill is given: yes, or nothing.
no_kill=yes
setup() {
    module load python openmpi || return
}
task=

# The rest need not be changed.
for name in sbatch scontrol squeue; do
    [ -x "${!name}" ] || printf -v "$name" %s "$name"
done
job=$SLURM_JOB_ID
if [ -n "$task" ] && [ -n "$SLURM_ARRAY_JOB_ID" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one task's SLURM_JOB_ID stands for the whole array
fi
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
# The copies are removed before the job's end.
[ -z "$SLURM_JOB_END_TIME" ] || export HPC_TRAIN_DEADLINE=$((SLURM_JOB_END_TIME - 10))
# SLURM signals this shell. The launcher passes the signal on to the ranks, which save and exit with 75.
# USR1 comes before the time limit. SIGTERM comes when the job is cancelled, preempted or requeued, and
# at the time limit. Only SLURM knows which: it is asked once the ranks have saved.
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
own_names+=(sbatch scontrol squeue)
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
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
count=$((${HPC_TRAIN_QUEUED:-0} + ${SLURM_RESTART_COUNT:-0})) # how often the job was queued again
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

newest() { # the newest checkpoint: its name has the step; the files of other programs have their time
    { # those of a `Loop` are in the run directory itself
        find "${own_dirs[@]}" -maxdepth 1 -type f -name 'step-[0-9]*.safetensors' -printf '%f\n'
        find "${own_dirs[@]/%//checkpoints}" -type f ! -name '.*' ! -name LATEST \
            \( -name 'step-*' -printf '%f\n' -o -printf '%T@ %f\n' \)
    } 2>/dev/null | LC_ALL=C sort | tail -n 1
}
# Programs and data are copied to the nodes' disks, and used from there.
from_copy() { # PROGRAM: where its copy is
    case $1 in
        "$environment"/*) echo "$HPC_TRAIN_STAGED/environment/${1#"$environment"/}" ;;
        *) type -P "$1" || echo "$1" ;;
    esac
}
remover= # what removes the copies when the job is ended
remove_copies() { # SECONDS
    trap - EXIT
    # SLURM may start no step now. If none waits for it, this script removes what it can.
    if [ -n "$remover" ] && [ -n "$terminated" ]; then
        [ -d "$copies" ] && [ ! -e "$copies/.remover_waits" ] || return
    fi
    timeout -s KILL "$1" "${stage_launcher[@]}" "${stage[@]}" --clean && return
    timeout -s KILL 10 rm -rf "$copies"
    echo "the copies were not removed from all nodes: look for $copies there"
}
if [ -z "$signalled" ]; then
    copies=$("${stage[@]}" --where) || fail staging
    trap 'remove_copies 60' EXIT
    if "${stage_launcher[@]}" "${stage[@]}"; then
        # SLURM starts no step while it ends a job. This one waits on each node, and removes the copy then.
        env -u SLURM_GPUS -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK -u SLURM_NTASKS_PER_GPU \
            srun --overlap --mpi=none --mem=0 --gres=none --no-kill --nodes="$SLURM_JOB_NUM_NODES" \
            --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 \
            --output=none --error=none "$copies/remove_at_end" >/dev/null 2>&1 &
        remover=$!
        # shellcheck source=/dev/null
        . "$copies/activate"
        command[0]=$(from_copy "${command[0]}")
        launcher[0]=$(from_copy "${launcher[0]}")
    elif [ -z "$signalled" ]; then
        fail staging
    fi
fi
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
again_by=("$sbatch" --export="$exported" ${task:+--array="$task"} "$script")
spell "${again_by[@]}"
if [ "$code" -eq 0 ]; then
    end
fi

undisturbed() { # SECONDS COMMAND: a signal to all processes of the job does not end it
    # `timeout` has its command take signals that this shell ignores.
    timeout -s KILL "$1" bash -c 'trap "" USR1 TERM; exec "$@"' - "${@:2}"
}
# SLURM's answer says whether the job is being cancelled, or comes back without this script.
ask() { answer=$(undisturbed 5 "$scontrol" show job --oneliner "$job" 2>/dev/null); }
ask
trap '' USR1 TERM # the next commands are not interrupted
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
    elif [ -z "$state" ] && [ -n "$terminated" ]; then
        why="SIGTERM came, and SLURM does not say why"
    elif [ -n "$state" ] && [ "$state" != RUNNING ] && [ "$(field Reason)" != TimeLimit ]; then
        why="the job was cancelled"
    elif [ "$state" = RUNNING ] && [ -n "$terminated" ]; then
        why="SIGTERM came, but not from SLURM"
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
        next=$(sed -En 's|^(Submitted batch job )?([0-9]+)(;.*)?$|\2|p' <<<"$answer" | tail -n 1)
        [ -n "$next" ] || uncertain "no job id was told" "$answer"
    elif [ "$failed" -eq 124 ] || [ "$failed" -eq 137 ]; then # `timeout` has ended it
        uncertain "no answer came" "$answer"
    fi
}
# A job that SLURM may queue again by itself is queued again by SLURM alone: a new one could be a second.
if [ "$requeue_by" = requeue ] && [ "$(field Requeue)" != 0 ]; then
    why="\`scontrol requeue\` failed"
    # `scontrol requeue` ends this script at once, and so does SLURM soon after the time limit.
    left=$((${SLURM_JOB_END_TIME:-0} - $(date +%s)))
    remove_copies $((left < 10 ? 10 : left > 60 ? 60 : left))
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
if [ -n "$next" ]; then
    why=
    resume_by=
    code=0
    echo "queued again: job $next"
fi
end
