#include <cuda_fp16.h>
#include <cstdio>
__constant__ float table[4] = {1.f, -2.5f, 3.f, 0.f};
__device__ int counter;
__device__ float *ptr_to;
struct P { int a; float b[3]; long long c; };
__device__ __noinline__ float twice(float x, int n) { float s = 0; for (int i = 0; i < n; i++) s += x * table[i & 3]; return s; }
extern "C" __global__ void __launch_bounds__(128, 2) small(const __grid_constant__ P p, float *out, const __half *in, int n) {
  __shared__ float tile[128];
  extern __shared__ char dyn[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = i < n ? __half2float(in[i]) : 0.f;
  float local[8];
  for (int k = 0; k < 8; k++) local[k] = p.b[k % 3] * k;
  __syncthreads();
  float v = tile[127 - threadIdx.x] + local[i & 7] + dyn[i & 15];
  unsigned a;
  asm volatile("{\n.reg .pred P1;\nsetp.ne.b32 P1, %1, 0;\nselp.b32 %0, 1, -1, P1;\n}" : "=r"(a) : "r"(i));
  switch (p.a) { case 0: v *= 2; break; case 1: v += twice(v, n); break; case 2: v = -v; break; case 3: v = 1.0 / v; break; case 4: v = exp(v); break; case 5: v -= 3; break; }
  if (v > 1e30f) printf("big %f %d\n", v, a);
  atomicAdd(&counter, __popc(__ballot_sync(~0u, v > 0)));
  out[i] = v * (double)p.c;
}
