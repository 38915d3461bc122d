#!/bin/bash
# One role on one node of the job: role.sh orchestrator|trainer|worker CONFIG WORDS...
# It is started again when the log, the store or its machine failed it, as systemd or Kubernetes
# would; what a start cannot mend ends the job with the role's exit code (README, exit codes).
set -uo pipefail
role=$1
shift
: "${ROLE_STARTS:=100}"
runs=(--runs "$SCRATCH_DIR/$SLURMD_NODENAME")
case $role in
  worker)
    command=(dora-pipe worker "$@" "${runs[@]}" --name "${SLURMD_NODENAME//./-}-$SLURM_LOCALID")
    if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then # its own, where the job has some
      first=$((SLURM_LOCALID * GPUS_PER_WORKER))
      CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + GPUS_PER_WORKER - 1)))
      export CUDA_VISIBLE_DEVICES
    fi
    ;;
  trainer)
    command=(dora-pipe trainer "$@" "${runs[@]}")
    read -ra trainers <<< "$TRAINER_NODELIST"
    for node in "${!trainers[@]}"; do
      [ "${trainers[$node]}" = "$SLURMD_NODENAME" ] || continue
      command+=(--nodes "${#trainers[@]}" --node "$node" --rendezvous "$FIRST_NODE:$RENDEZVOUS_PORT")
    done
    ;;
  *) command=(dora-pipe "$role" "$@" "${runs[@]}") ;;
esac

told=
child=
trap 'told=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
for ((start = 1; start <= ROLE_STARTS; start++)); do
  "${command[@]}" &
  child=$!
  code=0
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the role
    code=0
    wait "$child" || code=$?
  done
  [ -z "$told" ] || exit 0
  case $code in
    0 | 2 | 3 | 5 | 6 | 8 | 9 | 1[0-2]) exit "$code" ;;
  esac
  echo "$role ended with $code and is started again" >&2
  sleep 1
done
exit "$code"
