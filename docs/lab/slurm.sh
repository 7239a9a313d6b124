#!/bin/bash
# Trains RUN on Slurm, over as many time limits as it takes: `sbatch docs/lab/slurm.sh RECIPE RUN [--set ...]`.
# `sbatch --array=1-5 docs/lab/slurm.sh RECIPE RUN` trains seeds 1 to 5 side by side, as RUN-seed-1 to RUN-seed-5.
#
# Half a minute before its time is up, Slurm sends USR1; the trainer finishes its stage, and the job queues itself again.
# It does so just before the limit too if the stage takes longer; that stage is computed again. What starts then resumes
# the run. Submitted twice by mistake, the second job ends, because a run has one writer. Logs of scheduler and workers
# stay in metaloom-logs/JOB.
#SBATCH --job-name=metaloom
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=1
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@30
#SBATCH --open-mode=append
#SBATCH --requeue
set -eu
recipe=$1 run=$2
shift 2
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    run=$run-seed-$SLURM_ARRAY_TASK_ID
    set -- "$@" --set "seed=$SLURM_ARRAY_TASK_ID"
fi

# A folder that all nodes share: the runs, and for the time of the job the certificate of its Dask cluster.
export METALOOM_RUNS=${METALOOM_RUNS:-$PWD/runs}
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
logs=$PWD/metaloom-logs/$SLURM_JOB_ID
mkdir -p "$METALOOM_RUNS" "$logs"
job=$(mktemp -d "$PWD/.metaloom-job-$SLURM_JOB_ID-XXXX")
scheduler='' workers='' guard=''
end() {
    # Not every cluster ends what a job leaves behind.
    kill $scheduler $workers $guard 2> /dev/null || true
    rm -rf "$job"
}
trap end EXIT

# Whoever reaches a Dask scheduler can run code on its workers, so only this job's certificate is let in.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 30 -subj /CN=metaloom \
    -keyout "$job/key.pem" -out "$job/cert.pem" 2> "$logs/openssl.log"
export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=true DASK_DISTRIBUTED__COMM__TLS__CA_FILE=$job/cert.pem
for role in SCHEDULER WORKER CLIENT; do
    export "DASK_DISTRIBUTED__COMM__TLS__${role}__CERT=$job/cert.pem" "DASK_DISTRIBUTED__COMM__TLS__${role}__KEY=$job/key.pem"
done
# Nor do they show anything over HTTP, which asks nobody for a certificate.
export DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES='[]' DASK_DISTRIBUTED__WORKER__HTTP__ROUTES='[]'

# Starts a command again whenever it ends: workers end with their scheduler, and the trainer waits for both.
keep() {
    trap 'kill ${child:-} 2> /dev/null; exit' TERM
    while true; do
        "$@" &
        child=$!
        wait "$child" || true
        sleep 1
    done
}
address() { sed -n 's/.*"address": "\([^"]*\)".*/\1/p' "$job/scheduler.json" | head -n 1; }
# It says itself under which address it listens, as the first one of `hostname -I` need not be reachable; later it is the
# same.
dask_scheduler() {
    local port=0
    if [ -s "$job/scheduler.json" ]; then port=$(address | sed 's/.*://'); fi
    exec dask scheduler --protocol tls --port "$port" --no-dashboard --scheduler-file "$job/scheduler.json" \
        ${METALOOM_INTERFACE:+--interface "$METALOOM_INTERFACE"}
}
keep dask_scheduler >> "$logs/scheduler.log" 2>&1 &
scheduler=$!
SECONDS=0
until [ -s "$job/scheduler.json" ]; do
    [ "$SECONDS" -lt 120 ] || { cat "$logs/scheduler.log"; exit 1; }
    sleep 1
done
address=$(address)
keep srun --ntasks="$((SLURM_NTASKS > 1 ? SLURM_NTASKS - 1 : 1))" --overlap \
    dask worker "$address" --nthreads 1 --nworkers 1 --no-dashboard >> "$logs/workers.log" 2>&1 &
workers=$!

if metaloom show "$run" > /dev/null 2>&1; then
    command=(metaloom resume "$run")
else
    command=(metaloom train "$recipe" --run "$run" "$@")
fi
requeue() {
    echo "time is up: queueing job $SLURM_JOB_ID again, which resumes $run"
    scontrol requeue "$SLURM_JOB_ID"
}
# Seconds that Slurm leaves the job, of [days-][hours:]minutes:seconds; nothing where it has no limit.
left() {
    squeue --noheader --jobs "$SLURM_JOB_ID" --format %L | awk -F '[-:]' '/^[0-9].*:/ {
        n = $NF + 60 * $(NF - 1); if (NF > 2) n += 3600 * $(NF - 2); if (NF > 3) n += 86400 * $(NF - 3); print n }'
}
# Ends the trainer's stage, and the job before Slurm does, which would not queue it again.
guard() {
    local seconds
    trap 'kill ${child:-} 2> /dev/null; exit' TERM
    seconds=$(left)
    [ -n "$seconds" ] || exit 0
    sleep "$((seconds > 10 ? seconds - 10 : 0))" &
    child=$!
    wait "$child"
    requeue
}
stop() {
    kill -INT "${trainer:-$!}"
    if [ -z "$guard" ]; then
        guard &
        guard=$!
    fi
}
# The signal may come as soon as there is a trainer.
trainer=''
trap stop USR1
"${command[@]}" --scheduler "$address" &
trainer=$!
code=0
wait "$trainer" || code=$?
# A signal that comes while the shell waits ends the wait, with 138, not the trainer.
while kill -0 "$trainer" 2> /dev/null; do
    code=0
    wait "$trainer" || code=$?
done
# The trainer may have ended right after the signal, before the loop asked for it.
if [ "$code" = 138 ]; then
    code=0
    wait "$trainer" || code=$?
fi
end

if [ "$code" = 130 ]; then
    requeue
fi
exit "$code"
