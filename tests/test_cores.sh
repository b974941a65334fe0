#!/usr/bin/env bash
# The cores that a run uses: the same however OpenMP's variables bind its threads, fewer where the
# user, a launcher or other ranks leave it fewer. The start line says how many, and why.
. "$(dirname "$0")/lib.sh"
unset ${!OMP_@} ${!GOMP_@} OMPI_MCA_hwloc_base_binding_policy
all=$(getconf _NPROCESSORS_ONLN) last=$(taskset -cp $$ | sed 's/.*[ ,-]//')
[ "$all" -gt 1 ] && [ "$(nproc)" -eq "$all" ] && ! grep -qs '^[0-9]' /sys/fs/cgroup/cpu.max ||
    { skip cores 'not all of several cores are ours' && finish; }
tiny_model tiny 24 40 8
corpus 9
plan=("$release" --model tiny --from-scratch --train corpus --val-every 0 --num-samples 0 --steps 1000000
      --max-seqlen 64 --micro-batch-tokens 256 --overwrite --out)
# ---- the same cores, of all threads: those of OpenMP, the loader and what tokenizes ----------------
# cores_of COMMAND...: the start line's number, and the cores of all threads of a run that steps
cores_of() {
    start_long "$@" "${plan[@]}" run || return
    grep -oaE '[0-9]+ threads? of [0-9]+ cores[^,]*' long.txt
    grep -h Cpus_allowed_list "/proc/$job/task/"*/status | sort -u
    kill -9 $job; wait $job 2> /dev/null; job=
}
same_cores() {  # same_cores NAME FILE VARIABLE...: as without the variables, in FILE
    cores_of env "${@:3}" > found.txt
    same "$1" "$2" found.txt
}
cores_of env > free.txt
has all_cores "^$all threads of $all cores$" free.txt
has every_thread_may_use_them "^$(grep Cpus_allowed_list /proc/self/status)$" free.txt
for bind in true close spread master false; do same_cores "OMP_PROC_BIND_$bind" free.txt OMP_PROC_BIND=$bind; done
for places in threads cores; do same_cores "OMP_PLACES_$places" free.txt OMP_PLACES=$places; done
same_cores GOMP_CPU_AFFINITY free.txt GOMP_CPU_AFFINITY="0-$last"
same_cores bound_where_the_policy_is_given free.txt OMP_PROC_BIND=true OMP_WAIT_POLICY=passive
cores_of taskset -c "$last" > one.txt
has taskset_leaves_one "^1 thread of $all cores \(CPU affinity\)$" one.txt
same_cores taskset_and_OMP_PROC_BIND one.txt OMP_PROC_BIND=true taskset -c "$last"
same_cores one_place one.txt OMP_PLACES="{$last}"
# ---- OpenMP's numbers of threads --------------------------------------------------------------------
dry=("${plan[@]}" dry --dry-run)
says() { expect "$1" 0 "on cpu, $2, " "${@:3}"; }       # says NAME TEXT COMMAND...
says OMP_NUM_THREADS "3 threads of $all cores \(OMP_NUM_THREADS\)" env OMP_NUM_THREADS=3,2 "${dry[@]}"
says option_before_OMP_NUM_THREADS "1 thread of $all cores \(--threads\)" env OMP_NUM_THREADS=3 "${dry[@]}" --threads 1
says OMP_THREAD_LIMIT "1 thread of $all cores \(OMP_THREAD_LIMIT\)" env OMP_THREAD_LIMIT=1 "${dry[@]}"
says option_beyond_OMP_THREAD_LIMIT "1 thread of $all cores \(OMP_THREAD_LIMIT\)" env OMP_THREAD_LIMIT=1 "${dry[@]}" --threads 2
says more_than_OpenMP_can_start "4096 threads of $all cores \(OMP_NUM_THREADS\)" env OMP_NUM_THREADS=100000 "${dry[@]}"
says no_number "$all threads of $all cores" env OMP_NUM_THREADS=0 OMP_THREAD_LIMIT=99 "${dry[@]}"
# Three threads tokenize, and the main one waits for them.
yes '{"text": "as many lines as three threads and four"}' | head -n 100000 > many.jsonl
OMP_NUM_THREADS=3 "$release" --model demo --from-scratch --train many.jsonl --steps 0 --val-every 0 \
    --num-samples 0 --out many > out.txt 2>&1 &
tokenizer=$! threads=0
while kill -0 $tokenizer 2> /dev/null; do
    now=(/proc/$tokenizer/task/*)
    [ ${#now[@]} -le $threads ] || threads=${#now[@]}
done
judge OMP_NUM_THREADS_tokenizes "$([ $threads -eq 4 ] || echo "found $threads threads")"
# ---- ranks ------------------------------------------------------------------------------------------
with_ranks ranks "$release" || finish
bound="^warning: a rank may use less than its share of the machine's cores; for more: "
says bound_to_a_core "1 thread of $all cores \(CPU affinity\)" \
    "${mpi[@]}" --bind-to none -n 1 taskset -c "$last" "${dry[@]}"
has it_is_warned_of "${bound}mpirun --bind-to none, or --map-by slot:PE=CORES$" out.txt
says unbound "$all threads of $all cores" "${mpi[@]}" --bind-to none -n 1 "${dry[@]}"
lacks no_warning_when_unbound "$bound" out.txt
says unbound_ranks_share "$((all / 2)) threads? of $all cores \(shared by ranks\)" \
    "${mpi[@]}" --bind-to none -n 2 "${dry[@]}"
lacks no_warning_of_a_fair_share "$bound" out.txt
expect slurm_binds_to_a_core 0 "${bound}srun --cpus-per-task=CORES$" \
    env SLURM_STEP_NUM_TASKS=1 taskset -c "$last" "${dry[@]}"
# On a machine with eight cores, as far as Linux's list says, of which two are allowed: ranks that may
# use the same ones share them, others do not.
unshare -m mount -t tmpfs tmpfs /mnt 2> /dev/null || { skip eight_cores 'mounting needs root' && finish; }
echo 0-7 > eight
on_eight() {
    unshare -m sh -c 'mount --bind eight /sys/devices/system/cpu/online && exec taskset -c "0,$0" "$@"' "$last" \
        "${mpi[@]}" --bind-to none -n "$@"
}
says same_cores '1 thread of 8 cores \(shared by ranks\)' on_eight 2 "${dry[@]}"
has these_are_few "$bound" out.txt
says other_cores '2 threads of 8 cores \(CPU affinity\)' on_eight 2 \
    sh -c '[ "$OMPI_COMM_WORLD_RANK" -eq 0 ] || taskset -cp "$0" $$ && exec "$@"' "$last" "${dry[@]}"
says one_thread '1 thread of 8 cores \(--threads\)' on_eight 1 "${dry[@]}" --threads 1
lacks no_warning_of_one "$bound" out.txt
finish
