RESTARTS=${SLURM_RESTART_COUNT:-0}
say() { echo "grpocli: job $JOB: $*"; }
fail() { echo "grpocli: error: job $JOB: $*" >&2; exit "${CODE:-1}"; }

stopping=
trap 'stopping=yes; say "asked to stop"' USR1 TERM # set first, because USR1 would end this shell

# SLURM itself requeues a job after a node failure, without a limit
[ "$RESTARTS" -le "$MAX_REQUEUES" ] || fail "was requeued $MAX_REQUEUES times (hydra.launcher.max_requeues)"
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
say "start $((RESTARTS + 1)) of $RUN_DIR on ${HOSTS[*]}"

# every node must see the folder; network file systems may take half a minute to show a new file
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${SRUN[@]}" bash -c '
  for _ in $(seq 30); do [ -f "$0/config.yaml" ] && exit; sleep 1; done
  echo "grpocli: error: node $(hostname) does not see $0: hydra.sweep.dir must be on a shared file system" >&2
  exit 2' "$RUN_DIR" || { [ $? -ne 2 ] || exit 2; } # anything else that ends this step, such as a preemption, also ends the next one

ln -sfn "$LOGS/slurm-$JOB.log" "$RUN_DIR/slurm.log"
rm -f "$RUN_DIR/stop" "$RUN_DIR/again" "$RUN_DIR/engine/over"
export MASTER_ADDR=${HOSTS[0]}
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + 101 * RESTARTS) % 10000)) # below the ephemeral ports

alive() { [ -n "$1" ] && kill -0 "$1" 2>/dev/null; }
part() { # NAME FIRST COUNT COMMAND...: one task on each of COUNT nodes from number FIRST on, in the background
  local name=$1 hosts=("${HOSTS[@]:$2:$3}") count=$3
  shift 3
  srun --job-name="$name" --nodelist="$(IFS=,; echo "${hosts[*]}")" --nodes="$count" --ntasks="$count" \
    --ntasks-per-node=1 --kill-on-bad-exit=1 "${SRUN[@]}" "$@" &
}
step() { squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk -v name="$1" '$2 == name {print $1}'; }
end() { # NAME PID: TERM, then KILL after GRACE seconds; a TERM to srun itself would KILL its tasks at once
  alive "$2" || return 0
  scancel --signal=TERM "$(step "$1")" 2>/dev/null # some versions report an invalid id and deliver the signal
  for _ in $(seq "$GRACE"); do alive "$2" || return 0; sleep 1; done
  say "the $1 part has not ended within $GRACE s: killed"
  scancel --signal=KILL "$(step "$1")" 2>/dev/null || kill -KILL "$2"
}

part train 0 "$TRAIN_NODES" "${TRAIN[@]}"
train=$! rollout= gone=
if [ "$ROLLOUT_NODES" -gt 0 ]; then
  part rollout "$TRAIN_NODES" "$ROLLOUT_NODES" "${ROLLOUT[@]}"
  rollout=$!
fi
while alive "$train"; do
  [ -z "$stopping" ] || touch "$RUN_DIR/stop" # repeatedly, because a starting run removes old stop files
  if [ -n "$rollout" ] && ! alive "$rollout" && [ ! -e "$RUN_DIR/engine/over" ]; then
    gone=${gone:-$SECONDS} # the training may be ending by itself with its own error
    if [ $((SECONDS - gone)) -ge 10 ]; then
      say "the rollout part has ended before the training: ending the training"
      end train "$train"
    fi
  fi
  sleep 1
done
wait "$train"
code=$?
end rollout "$rollout"

[ "$code" -ne 0 ] || exit 0
FACTS=$(scontrol show job "$JOB" --oneliner)
fact() { grep -o " $1=[^ ]*" <<<"$FACTS" | head -n 1 | cut -d= -f2; }
preempted() { [[ "$(fact PreemptTime)" == 2* && "$(fact PreemptTime)" > "$(fact StartTime)" ]]; }
say "the training ended with exit code $code (job $(fact JobState), reason $(fact Reason))"
# a cancelled job, or one past its time limit, is COMPLETING while its parts end
[ "$(fact JobState)" = RUNNING ] || [ "$(fact Reason)" = TimeLimit ] || exit "$code"
[ -e "$RUN_DIR/again" ] || [ "$code" -eq 3 ] || preempted || exit "$code"
[ "$RESTARTS" -lt "$MAX_REQUEUES" ] || CODE=$code fail "stopped before its end, and was requeued $MAX_REQUEUES times \
(hydra.launcher.max_requeues); resume the run to continue"
say "queued again ($((RESTARTS + 1)) of at most $MAX_REQUEUES)"
scontrol requeue "$JOB" || CODE=$code fail "scontrol could not requeue it"
sleep 60 # until SLURM ends this shell
