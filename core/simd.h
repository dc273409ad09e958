/* One source, several instruction sets: a function marked PMOEI_VECTORISED is compiled for each and chosen when the
 * library loads. Sanitizer builds compile it once, since they cannot run the choosing code. */
#ifndef PMOEI_SIMD_H
#define PMOEI_SIMD_H

#if defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) &&     \
    !defined(PMOEI_NO_CLONES)
#define PMOEI_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define PMOEI_VECTORISED
#endif

/* Before a loop: its arrays overlap in the same place only. With _SUM its sum into `variable` may be taken in another
 * (fixed) order. */
#ifdef _OPENMP
#define PMOEI_PRAGMA(text) _Pragma(#text)
#define PMOEI_SIMD PMOEI_PRAGMA(omp simd)
#define PMOEI_SIMD_SUM(variable) PMOEI_PRAGMA(omp simd reduction(+ : variable))
#else
#define PMOEI_SIMD
#define PMOEI_SIMD_SUM(variable)
#endif

#endif
