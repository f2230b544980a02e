// Small kernels in the style people write them; kernels.ptx is `nvcc -ptx -arch=sm_90a -O3 -std=c++17` of this.
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <stdint.h>
#include <stdio.h>
namespace cg = cooperative_groups;
// block reduction with shuffles, shared memory, atomics
extern "C" __global__ void reduce_sum(const float* x, int n, float* out) {
  __shared__ float part[32];
  float s = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x < 32) {
    s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
    for (int o = 16; o; o >>= 1) s += __shfl_down_sync(~0u, s, o);
    if (threadIdx.x == 0) atomicAdd(out, s);
  }
}
// last block finishes: threadfence pattern
__device__ unsigned ticket;
extern "C" __global__ void last_block(const int* x, int n, int* part, int* out) {
  __shared__ int s; __shared__ bool last;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  int v = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
  atomicAdd(&s, v);
  __syncthreads();
  if (threadIdx.x == 0) {
    part[blockIdx.x] = s;
    __threadfence();
    last = atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    int t = 0;
    for (int i = 0; i < gridDim.x; i++) t += ((volatile int*)part)[i];
    *out = t;
  }
}
// grid barrier by hand, all CTAs resident
extern "C" __global__ void grid_barrier(int* counter, int* a, int* b) {
  a[blockIdx.x] = blockIdx.x + 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
    while (atomicAdd(counter, 0) < gridDim.x) {}
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) b[blockIdx.x] = a[(blockIdx.x + 1) % gridDim.x];
}
// spin lock within divergent lanes: independent thread scheduling
extern "C" __global__ void spin_lock(int* lock, int* value) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      __threadfence();
      *(volatile int*)value = *(volatile int*)value + 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
// cp.async double buffering + mma.sync m16n8k16, C[64x64] = A[64xK] B[64xK]^T, one CTA of 128 threads
extern "C" __global__ void mma_gemm(const __half* A, const __half* B, float* C, int K) {
  __shared__ alignas(16) __half sa[2][64][40], sb[2][64][40];
  const int t = threadIdx.x, w = t / 32, lane = t % 32;
  auto load = [&](int s, int k0) {
    for (int i = t; i < 64 * 4; i += 128) {
      int r = i / 4, c = i % 4 * 8;
      __pipeline_memcpy_async(&sa[s][r][c], A + r * K + k0 + c, 16);
      __pipeline_memcpy_async(&sb[s][r][c], B + r * K + k0 + c, 16);
    }
    __pipeline_commit();
  };
  float acc[8][4] = {};
  load(0, 0);
  for (int k0 = 0, s = 0; k0 < K; k0 += 32, s ^= 1) {
    if (k0 + 32 < K) { load(s ^ 1, k0 + 32); __pipeline_wait_prior(1); } else __pipeline_wait_prior(0);
    __syncthreads();
    for (int kk = 0; kk < 32; kk += 16) {
      uint32_t a[4];
      uint32_t pa = (uint32_t)__cvta_generic_to_shared(&sa[s][w * 16 + lane % 16][kk + lane / 16 * 8]);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(pa));
      for (int j = 0; j < 8; j++) {
        uint32_t b[2];
        uint32_t pb = (uint32_t)__cvta_generic_to_shared(&sb[s][j * 8 + lane % 8][kk + (lane / 8 % 2) * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(pb));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
      }
    }
    __syncthreads();
  }
  for (int j = 0; j < 8; j++)
    for (int h = 0; h < 2; h++)
      *(float2*)(C + (w * 16 + lane / 4 + 8 * h) * 64 + j * 8 + lane % 4 * 2) = make_float2(acc[j][2 * h], acc[j][2 * h + 1]);
}
// device functions, recursion-free calls, local arrays, switch, printf, 64-bit and float division
__device__ __noinline__ int collatz(int n) { int c = 0; while (n != 1) { n = n & 1 ? 3 * n + 1 : n / 2; c++; } return c; }
__device__ __noinline__ double blend(double a, float b, int c) { return a * b + c; }
extern "C" __global__ void scalars(const int* x, long long* out, double* outd, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int v = x[i];
  int local[16];
  for (int k = 0; k < 16; k++) local[k] = v * k;
  long long r = collatz(i + 1);
  switch (i % 7) {
    case 0: r += v / 3; break; case 1: r -= v % 5; break; case 2: r ^= (long long)v << 20; break;
    case 3: r *= v; break; case 4: r = __popc(v) + __clz(v) + __brev(v); break; case 5: r = (long long)v * 123456789012LL / (i + 7); break;
    default: r += local[(v & 15)];
  }
  out[i] = r;
  outd[i] = blend(v * 0.1, sqrtf(fabsf((float)v)), i) / (v + 0.5);
  if (i == 3) printf("lane %d: v=%d f=%.3f %s %5u|%-4d|%x\n", i, v, v * 0.5, "text", 7u, 3, 255);
}
// cooperative groups tiles, match, ballot
extern "C" __global__ void tiles(const int* x, int* out) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  int v = x[threadIdx.x];
  int s = cg::reduce(tile, v, cg::plus<int>());
  unsigned m = __match_any_sync(~0u, v & 3);
  unsigned b = __ballot_sync(~0u, v > 10);
  out[threadIdx.x] = s * 1000 + __popc(m) * 32 + __popc(b);
  if (v & 1) { auto g = cg::coalesced_threads(); out[threadIdx.x] += g.size() << 20; }
}
// half and bfloat16 arithmetic
extern "C" __global__ void halves(const __half2* x, const __nv_bfloat162* y, __half2* hx, __nv_bfloat162* by, float* f) {
  int i = threadIdx.x;
  __half2 a = x[i], b = x[(i + 1) % 64];
  hx[i] = __hfma2(a, b, __hmul2(a, a));
  hx[i] = __hadd2(hx[i], h2exp2(__hmax2(__hmin2(a, __float2half2_rn(1.f)), __float2half2_rn(-4.f))));
  by[i] = __hadd2(__hmul2(y[i], y[(i + 3) % 64]), __float2bfloat162_rn(0.25f));
  f[i] = __half2float(__low2half(a)) + __bfloat162float(__high2bfloat16(y[i]));
}
// radix-style scan with shared atomics and dynamic shared memory
extern "C" __global__ void histogram(const unsigned char* x, int n, unsigned* out) {
  extern __shared__ unsigned h[];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) h[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&h[x[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) if (h[i]) atomicAdd(out + i, h[i]);
}
