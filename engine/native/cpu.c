/* What this machine can run; called from the generic library before another one is chosen. */

/* 4 for x86-64-v4 (AVX-512), 3 for x86-64-v3 (AVX2 and FMA), 0 for neither or no x86. */
int hm_cpu_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
        return 3;
#endif
    return 0;
}
