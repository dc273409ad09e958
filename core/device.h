/* Marks an inline function that the CPU's files and kernels share, so that both compute by one formula. */
#ifndef PMOEI_DEVICE_H
#define PMOEI_DEVICE_H

#ifdef __CUDACC__
#define PMOEI_SHARED __host__ __device__ static inline
#else
#define PMOEI_SHARED static inline
#endif

#endif
