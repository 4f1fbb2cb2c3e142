JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}
RESTARTS=${SLURM_RESTART_COUNT:-0}
say() { echo "grpocli: job $JOB: $*"; }
fail() { echo "grpocli: error: job $JOB: $*" >&2; exit "${CODE:-1}"; }

# SLURM itself queues a job again after a node failed, as often as it likes
[ "$RESTARTS" -le "$MAX_REQUEUES" ] || fail "was requeued $MAX_REQUEUES times (hydra.launcher.max_requeues)"
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
say "start $((RESTARTS + 1)) of $RUN_DIR on ${HOSTS[*]}"

# every node must see the folder; network file systems may take half a minute to show a new file
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${SRUN[@]}" bash -c '
  for _ in $(seq 30); do [ -f "$0/config.yaml" ] && exit; sleep 1; done
  echo "grpocli: error: node $(hostname) does not see $0: hydra.sweep.dir must be on a shared file system" >&2
  exit 2' "$RUN_DIR" || exit 2

ln -sfn "$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -o 'StdOut=.*' | sed 's/StdOut=//; s/ [A-Z][A-Za-z]*=.*//')" "$RUN_DIR/slurm.log"
rm -f "$RUN_DIR/stop" "$RUN_DIR/again" "$RUN_DIR/engine/over"
export MASTER_ADDR=${HOSTS[0]}
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + 101 * RESTARTS) % 10000)) # below the ports that systems give out
