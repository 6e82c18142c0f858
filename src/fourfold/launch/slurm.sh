
# -- the warning: Slurm sends USR1 to this script alone, $grace_period_s seconds before the time limit
warned=no
trap 'warned=yes' USR1
# TERM: the job is cancelled, or Slurm ends it. The ranks get it too, and save; the job is not requeued.
ended=no
trap 'ended=yes' TERM

# A requeued job keeps its id; agents of an earlier start must not join the rendezvous of this one.
start=${SLURM_RESTART_COUNT:-0}

# -- the rendezvous: on the first host, at the address by which Slurm reaches it, on a port of this job and start
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
export address=${address:-$first} port=$((20000 + (SLURM_JOB_ID + 1009 * start) % 10000))
export rendezvous=$SLURM_JOB_ID.$start
echo "job $SLURM_JOB_ID, start $start, $(date '+%F %T'): $nodes nodes of $ranks_per_node ranks, rendezvous at $address:$port"

# -- one agent on each node, which starts the ranks
# The rendezvous is static: nodes keep Slurm's order, which follows the network, and no agent fails because the first
# one has exited already, as with c10d.
mkdir -p "$logs/$SLURM_JOB_ID"
# A node that exits first must not kill the others, which may still be saving: they have a minute.
# The ranks of a node are in one Slurm task, which must not be bound to a single core.
# Since Slurm 22.05, srun does not inherit --cpus-per-task from the job.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 --cpu-bind=none \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    --open-mode=append --output="$logs/%j/node-%n.log" \
    bash -c 'python=$1; shift
        exec "$python" -m fourfold.launch.agent \
            --nnodes="$nodes" --nproc-per-node="$ranks_per_node" --max-restarts="$max_restarts" \
            --rdzv-backend=static --node-rank="$SLURM_NODEID" \
            --master-addr="$address" --master-port="$port" --rdzv-id="$rendezvous" \
            --log-dir="$logs/$SLURM_JOB_ID/node-$SLURM_NODEID" --redirects=3 --tee=0:3 \
            "$@"' agent "$python" "${command[@]}" &
step=$!
wait "$step"
status=$?
while [ "$ended" = yes ] && kill -0 "$step" 2>/dev/null; do # the ranks would end with this script
    wait "$step"
    status=$?
done

# -- after the warning: send it to all processes of the step, repeatedly, since a rank may still be starting
if [ "$warned" = yes ]; then
    echo "warned at $(date '+%F %T'): the ranks save"
    # Requeue after the deadline even if ranks are still running: after the time limit it is not possible.
    deadline=$((SECONDS + grace_period_s * 3 / 4))
    while kill -0 "$step" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do
        kill -USR1 "$step"
        for _ in 1 2 3 4 5; do
            ! kill -0 "$step" 2>/dev/null || sleep 1
        done
    done
    if kill -0 "$step" 2>/dev/null; then
        echo "the ranks did not end in time; the next start resumes from the previous checkpoint"
        status=1
    else
        wait "$step"
        last=$?
        [ "$last" = 127 ] || status=$last # 127: the warning came after the step had ended
    fi
fi

# -- exit or requeue: a warned run is not finished, unless its exit code says so
echo "start $start ended with exit code $status"
if [ "$status" = 0 ] || [ "$ended" = yes ] || { [ "$warned" = no ] && [ "$status" != "$continue_exit_code" ]; }; then
    exit "$status"
fi
if [ "$start" -ge "$max_requeues" ]; then
    echo "this was start $start; --max-requeues $max_requeues does not allow another"
    exit "$status"
fi
scontrol requeue "$SLURM_JOB_ID" || exit "$status"
