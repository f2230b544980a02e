//! Warpgroup matrix instructions of sm_90a: 128 threads, operands in shared memory or (A) registers.
//!
//! After the descriptors: `p` false ignores D; the two numbers in {-1, 1} negate A and B; 16-bit types add a
//! transpose flag per operand in shared memory.

rows! { Wgmma;
    wgmma_fence 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-fence" "wgmma.fence.sync.aligned";
    wgmma_commit 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group" "wgmma.commit_group.sync.aligned";
    wgmma_wait 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group" "wgmma.wait_group.sync.aligned  n:#0..7";
    wgmma_f16_ss 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k16.f32.<T=f16|bf16>.<T>  {d:f32*N/2}, a:b64!, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1, trans_a:#0|1, trans_b:#0|1";
    wgmma_f16_rs 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k16.f32.<T=f16|bf16>.<T>  {d:f32*N/2}, {a:b32!*4}, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1, trans_b:#0|1";
    wgmma_f16_half_ss 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k16.f16.f16.f16  {d:b32*N/4}, a:b64!, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1, trans_a:#0|1, trans_b:#0|1";
    wgmma_f16_half_rs 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k16.f16.f16.f16  {d:b32*N/4}, {a:b32!*4}, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1, trans_b:#0|1";
    wgmma_tf32_ss 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k8.f32.tf32.tf32  {d:f32*N/2}, a:b64!, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1";
    wgmma_tf32_rs 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k8.f32.tf32.tf32  {d:f32*N/2}, {a:b32!*4}, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1";
    wgmma_f8_ss 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k32.f32.<e4m3|e5m2>.<e4m3|e5m2>  {d:f32*N/2}, a:b64!, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1";
    wgmma_f8_rs 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k32.f32.<e4m3|e5m2>.<e4m3|e5m2>  {d:f32*N/2}, {a:b32!*4}, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1";
    wgmma_f8_half_ss 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k32.f16.<e4m3|e5m2>.<e4m3|e5m2>  {d:b32*N/4}, a:b64!, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1";
    wgmma_f8_half_rs 8.0 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8..256/8>k32.f16.<e4m3|e5m2>.<e4m3|e5m2>  {d:b32*N/4}, {a:b32!*4}, b:b64!, p:pred, neg_a:#-1|1, neg_b:#-1|1";
    wgmma_s8_ss 8.4 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8|16|24|32|48|64|80|96|112|128|144|160|176|192|208|224|240|256>k32.s32.<s8|u8>.<s8|u8>{.satfinite}  {d:b32*N/2}, a:b64!, b:b64!, p:pred";
    wgmma_s8_rs 8.4 SM90A "asynchronous-warpgroup-level-matrix-instructions-wgmma-mma" "wgmma.mma_async.sync.aligned.m64n<N=8|16|24|32|48|64|80|96|112|128|144|160|176|192|208|224|240|256>k32.s32.<s8|u8>.<s8|u8>{.satfinite}  {d:b32*N/2}, {a:b32!*4}, b:b64!, p:pred";
}
