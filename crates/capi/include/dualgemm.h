// dualgemm: C = act(A * gate^T, A * up^T) with 4-bit gate and up. Made by cbindgen from crates/capi/src; see
// crates/capi/tests/header.rs. Link with libdualgemm_c.
//
// Every function that can fail returns a dualgemm_status; dualgemm_last_error() then says what is wrong. Handles
// belong to the caller, who frees each once. Functions may be called from any thread, also with the same handles.


#ifndef DUALGEMM_H
#define DUALGEMM_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// How A is quantized to nvfp4 on the way in: not at all.
#define DUALGEMM_QUANTIZE_A_NO 0.0

// How A is quantized to nvfp4 on the way in: with a tensor scale from A. Any positive number is the tensor scale.
#define DUALGEMM_QUANTIZE_A_DYNAMIC -1.0

// What became of a call.
enum dualgemm_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  DUALGEMM_STATUS_OK = 0,
  // A checkpoint cannot be read, or breaks a rule.
  DUALGEMM_STATUS_CHECKPOINT = 1,
  // An operand breaks a rule of its format or does not fit the plan.
  DUALGEMM_STATUS_OPERAND = 2,
  // Valid, but not possible with this build or on this machine.
  DUALGEMM_STATUS_UNSUPPORTED = 3,
  // An argument that makes no sense, such as a null pointer.
  DUALGEMM_STATUS_ARGUMENT = 4,
  // A bug in dualgemm; please report it.
  DUALGEMM_STATUS_INTERNAL = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dualgemm_status dualgemm_status;
#else
typedef uint32_t dualgemm_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Formats of elements.
enum dualgemm_format
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // 32-bit float.
  DUALGEMM_FORMAT_F32 = 0,
  // IEEE half.
  DUALGEMM_FORMAT_F16 = 1,
  // bfloat16.
  DUALGEMM_FORMAT_BF16 = 2,
  // 4-bit codes, two per byte, the even element low; an e4m3 scale per 16.
  DUALGEMM_FORMAT_NVFP4 = 3,
  // 4-bit codes, two per byte, the even element low; a ue8m0 scale per 32.
  DUALGEMM_FORMAT_MXFP4 = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dualgemm_format dualgemm_format;
#else
typedef uint32_t dualgemm_format;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Orders of block scales in memory.
enum dualgemm_scale_layout
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Row-major, no padding.
  DUALGEMM_SCALE_LAYOUT_LINEAR = 0,
  // Tiles of 128 rows by 4 blocks, as cuBLAS and CUTLASS read them.
  DUALGEMM_SCALE_LAYOUT_SF128X4 = 1,
  // Tiles of 8 rows by 4 blocks.
  DUALGEMM_SCALE_LAYOUT_SF8X4 = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dualgemm_scale_layout dualgemm_scale_layout;
#else
typedef uint32_t dualgemm_scale_layout;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A problem planned for weights of one shape.
typedef struct dualgemm_plan dualgemm_plan;

// Gate and up of one gated MLP, a linear layer, a whole MLP or the experts of a mixture, packed for a target.
typedef struct dualgemm_weights dualgemm_weights;

// A problem, known before any tensor is: A `[m, k]`, C `[m, n]`, and what the weights say that C is of A.
typedef struct dualgemm_desc {
  // Rows of A at most.
  size_t m;
  // A `dualgemm_format`: that of A.
  uint32_t a_format;
  // A `dualgemm_format`: that of C. Nvfp4 re-quantizes C for the down projection.
  uint32_t c_format;
  // DUALGEMM_QUANTIZE_A_NO, DUALGEMM_QUANTIZE_A_DYNAMIC, or the tensor scale.
  float quantize_a;
  // A `dualgemm_scale_layout`: that of an Nvfp4 C.
  uint32_t c_scale_layout;
  // Tensor scale of an Nvfp4 C; 0 for one from C.
  float c_global_scale;
  // A `dualgemm_scale_layout`: that of an Nvfp4 A in the memory of a GPU. On the processor every A may have its own.
  uint32_t a_scale_layout;
  // The function of both products: silu, clamped-silu(:LIMIT), swiglustep(:LIMIT), swigluoai(:ALPHA,BETA,LIMIT),
  // gelu-tanh, relu, relu2 or identity. Null for the one that the weights' checkpoint states, or silu for weights from
  // tensors. Not kept.
  const char *activation;
  // A `dualgemm_format`: that between the products of a whole MLP or a mixture. A GPU takes F16, Bf16 and Nvfp4.
  uint32_t between_format;
  // Tensor scale of an Nvfp4 between the products; 0 for one from its values, on the processor.
  float between_global_scale;
  // Experts of each token of a mixture.
  size_t top_k;
} dualgemm_desc;

// A matrix `[rows, k]` in memory that the caller keeps for as long as the call lasts; for a run on a GPU, device memory,
// kept until the run has ended.
typedef struct dualgemm_matrix {
  // A `dualgemm_format`.
  uint32_t format;
  // Rows: tokens of A, features of gate and up.
  size_t rows;
  // Elements per row.
  size_t k;
  // Bytes from one row to the next; 0 where rows follow each other without gaps. Codes on a GPU do; floats there have
  // rows at multiples of 16 bytes.
  size_t row_stride;
  // Elements or codes, aligned as their type is; on a GPU at a multiple of 16 bytes.
  const void *data;
  // Block scales of a 4-bit matrix, else null.
  const uint8_t *scales;
  // A `dualgemm_scale_layout`.
  uint32_t scale_layout;
  // What a 4-bit matrix is multiplied with; the reciprocal of what compressed-tensors stores.
  float global_scale;
} dualgemm_matrix;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Takes memory of a GPU, at a multiple of 256 bytes. Only for programs that do not use CUDA themselves: memory of
// `cuMemAlloc`, `cudaMalloc` and whatever is made of them is as good.
//
// # Safety
// `target` is a string; `out` can be written.
dualgemm_status dualgemm_device_alloc(const char *target,
                                      size_t bytes,
                                      void **out);

// Gives back what `dualgemm_device_alloc` gave; null is fine. Runs that use it have ended.
//
// # Safety
// `target` is a string.
dualgemm_status dualgemm_device_free(const char *target, void *memory);

// Copies from the host to memory that `dualgemm_device_alloc` gave. Not ordered with streams of the caller.
//
// # Safety
// `target` is a string; `from` points at `bytes` bytes.
dualgemm_status dualgemm_device_write(const char *target, void *to, const void *from, size_t bytes);

// Copies to the host from memory that `dualgemm_device_alloc` gave. Not ordered with streams of the caller.
//
// # Safety
// `target` is a string; `to` can be written for `bytes` bytes.
dualgemm_status dualgemm_device_read(const char *target, void *to, const void *from, size_t bytes);

// Waits for all streams of a GPU; a failure of a kernel is reported here at the latest.
//
// # Safety
// `target` is a string.
dualgemm_status dualgemm_device_synchronize(const char *target);

// Plans a problem for weights of the shape, format and target of `weights`. The plan does not keep them: it serves every
// layer of that shape.
//
// # Safety
// `desc` points at a description whose activation is null or a string, `weights` is a handle, `out` can be written.
dualgemm_status dualgemm_plan_new(const struct dualgemm_desc *desc,
                                  const struct dualgemm_weights *weights,
                                  struct dualgemm_plan **out);

// What the plan is, for people. It stays for as long as the plan; null for a plan that is null.
//
// # Safety
// `plan` is a handle or null.
const char *dualgemm_plan_text(const struct dualgemm_plan *plan);

// Frees a plan; null is fine.
//
// # Safety
// `plan` is a handle that no call uses any more, or null.
void dualgemm_plan_free(struct dualgemm_plan *plan);

// Takes the memory and loads the kernels that runs with these weights on `stream` need: the first run then allocates
// nothing and can be recorded into a CUDA graph. Later runs never do. On the processor there is nothing to do.
//
// # Safety
// `plan` and `weights` are handles, `stream` is as for `dualgemm_run`.
dualgemm_status dualgemm_plan_warm(const struct dualgemm_plan *plan,
                                   const struct dualgemm_weights *weights,
                                   void *stream);

// Computes C of the rows of `a`, up to the `m` of the plan, row-major without gaps into `c`: `rows · n` elements, or
// `rows · n / 2` bytes of codes.
//
// An Nvfp4 C needs `c_scales`, block scales in the layout of the plan with padding, and writes its tensor scale to
// `c_global_scale`; for others both may be null.
//
// On the processor all pointers are the host's, and `stream` is null. On a GPU all are device memory; only
// addresses are looked at here: the run is put on `stream` (a `CUstream` or `cudaStream_t` of the GPU's primary context,
// null for the legacy default stream), nothing is waited for, and operands must be there until it has ended. `c` is at a
// multiple of 16 bytes; the padding of `c_scales` stays as it is; `c_global_scale` is not written where the plan fixes it.
// Each stream has scratch memory of its own from its first run on, for as long as the plan lives: a stream must be
// synchronized before it is destroyed, and CU_STREAM_PER_THREAD is for one thread.
//
// # Safety
// All pointers that are not null point at what is described above, in the memory of the plan's target; no operand lies in
// the memory of C; `stream` is a stream of that target.
dualgemm_status dualgemm_run(const struct dualgemm_plan *plan,
                             const struct dualgemm_matrix *a,
                             const struct dualgemm_weights *weights,
                             void *c,
                             uint8_t *c_scales,
                             float *c_global_scale,
                             void *stream);

// As `dualgemm_run`, for the weights of a mixture: C of each token is the sum over its `top_k` experts, each multiplied by its
// weight, in the order of the lists; with `add`, results are added to what C holds, as to a shared expert's. `topk_ids` and
// `topk_weights` are `[rows, top_k]`, in the memory of the plan's target. -1 skips an expert. On the processor another number that is no expert's is an error; a GPU skips it.
//
// # Safety
// As for `dualgemm_run`, for the lists too.
dualgemm_status dualgemm_run_mixture(const struct dualgemm_plan *plan,
                                     const struct dualgemm_matrix *a,
                                     const int32_t *topk_ids,
                                     const float *topk_weights,
                                     const struct dualgemm_weights *weights,
                                     void *c,
                                     bool add,
                                     void *stream);

// What the last call of this thread that failed has to say: one line, which stays until another one fails. Never
// null.
const char *dualgemm_last_error(void);

// The version of the library, such as "0.1.0".
const char *dualgemm_version(void);

// Packs gate and up of a layer's dense MLP from a checkpoint: a directory, a .safetensors, a .safetensors.index.json or
// a .gguf file. Of the features, rank `rank` of `world` gets its share and reads no others; 0 of 1 is all of them. Plans
// for these weights compute the activation that the checkpoint states, unless they are asked for another; where it states
// none, they have to be asked for one.
//
// `target` is where they are packed for: null or "cpu" for the processor, "cuda:N" for a GPU, to which they are then
// copied, "sim:sm_90a" for a simulated one.
//
// # Safety
// `path` is a string that ends with a zero, `target` too or null; `out` can be written.
dualgemm_status dualgemm_weights_from_checkpoint(const char *target,
                                                 const char *path,
                                                 size_t layer,
                                                 size_t rank,
                                                 size_t world,
                                                 struct dualgemm_weights **out);

// Packs a linear layer of a checkpoint, by the name of its module. Plans for it compute A · Wᵀ, plus its bias.
//
// # Safety
// `path` and `module` are strings that end with a zero, `target` too or null; `out` can be written.
dualgemm_status dualgemm_linear_from_checkpoint(const char *target,
                                                const char *path,
                                                const char *module,
                                                struct dualgemm_weights **out);

// Packs a layer's whole dense MLP from a checkpoint. Plans for it compute act(A · gateᵀ, A · upᵀ) · downᵀ.
//
// # Safety
// As for `dualgemm_weights_from_checkpoint`.
dualgemm_status dualgemm_mlp_from_checkpoint(const char *target,
                                             const char *path,
                                             size_t layer,
                                             struct dualgemm_weights **out);

// Packs all routed experts of a layer from a checkpoint, numbered from 0. Plans for them compute the weighted sum of each
// token's experts; see `dualgemm_run_mixture`. The router's weights multiply what goes into experts where the model's family
// does so (Llama 4), else what comes out. A shared expert is an MLP of its own.
//
// # Safety
// As for `dualgemm_weights_from_checkpoint`.
dualgemm_status dualgemm_mixture_from_checkpoint(const char *target,
                                                 const char *path,
                                                 size_t layer,
                                                 struct dualgemm_weights **out);

// Packs `experts` MLPs of three 4-bit matrices each, without biases: the experts of a mixture, or with 0 for `experts` the one
// whole MLP that the lists then hold. Nothing refers to their memory, which is the host's, afterwards. A linear layer is
// `dualgemm_linear_from_tensors`.
//
// # Safety
// The lists have `experts` descriptions, or one, of memory that is there; `target` is a string or null; `out` can be written.
dualgemm_status dualgemm_mlps_from_tensors(const char *target,
                                           const struct dualgemm_matrix *gate,
                                           const struct dualgemm_matrix *up,
                                           const struct dualgemm_matrix *down,
                                           size_t experts,
                                           struct dualgemm_weights **out);

// Packs a linear layer: a 4-bit matrix `[n, k]`, and `n` values of a bias or null.
//
// # Safety
// `weight` describes memory that is there, `bias` has as many values as it has rows or is null; `target` is a string or null;
// `out` can be written.
dualgemm_status dualgemm_linear_from_tensors(const char *target,
                                             const struct dualgemm_matrix *weight,
                                             const float *bias,
                                             struct dualgemm_weights **out);

// Packs two 4-bit matrices `[n, k]`: `gate`, whose product goes through the activation, and `up`, whose product
// multiplies it. Nothing refers to their memory, which is the host's, afterwards. `target` as for
// `dualgemm_weights_from_checkpoint`.
//
// # Safety
// `gate` and `up` describe memory that is there; `target` is a string or null; `out` can be written.
dualgemm_status dualgemm_weights_from_tensors(const char *target,
                                              const struct dualgemm_matrix *gate,
                                              const struct dualgemm_matrix *up,
                                              struct dualgemm_weights **out);

// As `dualgemm_weights_from_tensors`, for matrices in the memory of a GPU: they are packed there, mxfp4 on Blackwell only,
// after what `stream` (a `CUstream` of the GPU's primary context) was given before. Waits for it. Block scales are not
// looked at: none may be NaN or negative.
//
// # Safety
// `gate` and `up` describe device memory that is there, `target` is a string, `stream` a stream of that GPU or null, `out`
// can be written.
dualgemm_status dualgemm_weights_from_device(const char *target,
                                             const struct dualgemm_matrix *gate,
                                             const struct dualgemm_matrix *up,
                                             void *stream,
                                             struct dualgemm_weights **out);

// The shape of what plans for the weights compute: `n` features of C, `k` elements of A. Either pointer may be null.
//
// # Safety
// `weights` is a handle; `n` and `k` can be written or are null.
dualgemm_status dualgemm_weights_shape(const struct dualgemm_weights *weights,
                                       size_t *n,
                                       size_t *k);

// Frees weights; null is fine.
//
// # Safety
// `weights` is a handle that no call uses any more, or null.
void dualgemm_weights_free(struct dualgemm_weights *weights);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DUALGEMM_H */
