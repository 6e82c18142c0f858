
# -- the warning: Slurm sends USR1 to this script alone, $warning_s seconds before the time limit
warned=no
trap 'warned=yes' USR1
# TERM: somebody cancels the job, or Slurm ends it. The ranks get it too, and save; who wants it again says so.
ended=no
trap 'ended=yes' TERM

# A requeued job keeps its number; agents of an earlier start are not to meet those of this one.
start=${SLURM_RESTART_COUNT:-0}

# -- where the agents meet: on the first host, at the address by which Slurm reaches it, on a port of this job and start
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
export address=${address:-$first} port=$((20000 + (SLURM_JOB_ID + 1009 * start) % 10000))
export meeting=$SLURM_JOB_ID.$start
echo "job $SLURM_JOB_ID, start $start, $(date '+%F %T'): $nodes nodes of $ranks_per_node ranks meet at $address:$port"

# -- one agent on each node, which starts the ranks
# The meeting is static: nodes keep Slurm's order, which knows the network, and no agent fails for asking the first one
# about newcomers when that one has ended already, as with c10d.
mkdir -p "$logs/$SLURM_JOB_ID"
# A node that ends first is no reason to kill the others, which may still be saving: they have a minute.
# The ranks of a node are in one task of Slurm, and are not to share the one core that a task may be bound to.
# Since Slurm 22.05 srun does not take --cpus-per-task from the job by itself.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 --cpu-bind=none \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    --open-mode=append --output="$logs/%j/node-%n.log" \
    bash -c 'python=$1; shift
        exec "$python" -m fourfold.launch.agent \
            --nnodes="$nodes" --nproc-per-node="$ranks_per_node" --max-restarts="$max_restarts" \
            --rdzv-backend=static --node-rank="$SLURM_NODEID" \
            --master-addr="$address" --master-port="$port" --rdzv-id="$meeting" \
            --log-dir="$logs/$SLURM_JOB_ID/node-$SLURM_NODEID" --redirects=3 --tee=0:3 \
            "$@"' agent "$python" "${command[@]}" &
step=$!
wait "$step"
status=$?
while [ "$ended" = yes ] && kill -0 "$step" 2>/dev/null; do # this script's end would be that of the ranks
    wait "$step"
    status=$?
done

# -- after the warning: all processes of the step get it, and again, for a rank may have been too young to hear it
if [ "$warned" = yes ]; then
    echo "warned at $(date '+%F %T'): the ranks save"
    # What has not ended by then is requeued as it is: after the time limit nobody could.
    deadline=$((SECONDS + warning_s * 3 / 4))
    while kill -0 "$step" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do
        kill -USR1 "$step"
        for _ in 1 2 3 4 5; do
            ! kill -0 "$step" 2>/dev/null || sleep 1
        done
    done
    if kill -0 "$step" 2>/dev/null; then
        echo "the ranks did not end in time; the next start goes on from the checkpoint before"
        status=1
    else
        wait "$step"
        last=$?
        [ "$last" = 127 ] || status=$last # 127: the warning came after the end, which is known already
    fi
fi

# -- the end, or another start: a run that is warned is not finished, unless its ranks say so
echo "start $start ended with status $status"
if [ "$status" = 0 ] || [ "$ended" = yes ] || { [ "$warned" = no ] && [ "$status" != "$continue_status" ]; }; then
    exit "$status"
fi
if [ "$start" -ge "$max_requeues" ]; then
    echo "this was start $start; --max-requeues $max_requeues allows no other"
    exit "$status"
fi
scontrol requeue "$SLURM_JOB_ID" || exit "$status"
