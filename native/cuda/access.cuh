// Reads and writes of the kernels.
#pragma once

#include <cstdint>

namespace kvbm::device {

// Of W bytes, aligned. Wide ones pass by the L1: nothing of a block is used twice. Narrow ones do not, since neighbours
// share their cache lines.
template <int W>
struct Access;
template <>
struct Access<16> {
  using Type = uint4;
  static __device__ __forceinline__ Type load(const char *p) { return __ldcg(reinterpret_cast<const uint4 *>(p)); }
  static __device__ __forceinline__ void store(char *p, Type v) { __stcg(reinterpret_cast<uint4 *>(p), v); }
};

// Of 16 bytes, whose lines the L2 lets go of first: for the whole vectors of a copy that is bounded because a model
// runs beside it, which is to keep its cache. Where a copy has the GPU for itself, this costs some of its speed: the
// lines of others stay in the L2, and its own have to make do with the rest.
struct PassingAccess {
  static __device__ __forceinline__ uint4 load(const char *p) {
#if __CUDA_ARCH__ >= 800
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(p)), "l"(evict_first()));
    return v;
#else
    return __ldcs(reinterpret_cast<const uint4 *>(p));
#endif
  }
  static __device__ __forceinline__ void store(char *p, uint4 v) {
#if __CUDA_ARCH__ >= 800
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(__cvta_generic_to_global(p)),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(evict_first())
                 : "memory");
#else
    __stcs(reinterpret_cast<uint4 *>(p), v);
#endif
  }

 private:
  static __device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }
};

template <typename T>
struct Narrow {
  using Type = T;
  static __device__ __forceinline__ T load(const char *p) { return __ldca(reinterpret_cast<const T *>(p)); }
  static __device__ __forceinline__ void store(char *p, T v) { __stwb(reinterpret_cast<T *>(p), v); }
};
template <>
struct Access<8> : Narrow<uint2> {};
template <>
struct Access<4> : Narrow<unsigned> {};
template <>
struct Access<2> : Narrow<unsigned short> {};
template <>
struct Access<1> : Narrow<unsigned char> {};

}  // namespace kvbm::device
