//! Warp-level matrix instructions: fragments in the registers of 32 lanes.

rows! { Mma;
    ldmatrix 6.5 ALL "warp-level-matrix-instructions-ldmatrix" "ldmatrix.sync.aligned.m8n8.x<N=1|2|4>{.trans}{.<S=shared>}.b16  {d:b32*N}, [a:S]";
    ldmatrix_window 7.8 ALL "warp-level-matrix-instructions-ldmatrix" "ldmatrix.sync.aligned.m8n8.x<N=1|2|4>{.trans}.shared::cta.b16  {d:b32*N}, [a:shared]";
    ldmatrix_b8 8.6 BLACKWELL "warp-level-matrix-instructions-ldmatrix" "ldmatrix.sync.aligned.m16n16.x<N=1|2>.trans.<shared|shared::cta>.b8  {d:b32*N*2}, [a:shared]";
    ldmatrix_unpack 8.6 BLACKWELL "warp-level-matrix-instructions-ldmatrix" "ldmatrix.sync.aligned.m8n16.x<N=1|2|4>.<shared|shared::cta>.b8x16.<b6x16_p32|b4x16_p64>  {d:b32*N}, [a:shared]";
    stmatrix 7.8 SM90_UP "warp-level-matrix-instructions-stmatrix" "stmatrix.sync.aligned.m8n8.x<N=1|2|4>{.trans}.<shared|shared::cta>.b16  [a:shared], {b:b32!*N}";
    stmatrix_b8 8.6 BLACKWELL "warp-level-matrix-instructions-stmatrix" "stmatrix.sync.aligned.m16n8.x<N=1|2|4>.trans.<shared|shared::cta>.b8  [a:shared], {b:b32!*N}";
    movmatrix 7.8 ALL "warp-level-matrix-instructions-movmatrix" "movmatrix.sync.aligned.m8n8.trans.b16  d:b32, a:b32!";

    mma_f16_k8 6.5 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32  {d:f32*4}, {a:b32!*2}, {b:b32!*1}, {c:f32*4}";
    mma_f16 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k16.row.col.f32.<T=f16|bf16>.<T>.f32  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}";
    mma_f16_half 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16  {d:b32*2}, {a:b32!*4}, {b:b32!*2}, {c:b32*2}";
    mma_tf32 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}";
    mma_s8 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col{.satfinite}.s32.<u8|s8>.<u8|s8>.s32  {d:b32*4}, {a:b32!*4}, {b:b32!*2}, {c:b32*4}";
    mma_bf16_k8 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32  {d:f32*4}, {a:b32!*2}, {b:b32!*1}, {c:f32*4}";
    mma_f16_k8_half 6.5 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16  {d:b32*2}, {a:b32!*2}, {b:b32!*1}, {c:b32*2}";
    mma_tf32_k4 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32  {d:f32*4}, {a:b32!*2}, {b:b32!*1}, {c:f32*4}";
    mma_s8_m8 6.5 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m8n8k16.row.col{.satfinite}.s32.<u8|s8>.<u8|s8>.s32  {d:b32*2}, {a:b32!*1}, {b:b32!*1}, {c:b32*2}";
    mma_s8_k16 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k16.row.col{.satfinite}.s32.<u8|s8>.<u8|s8>.s32  {d:b32*4}, {a:b32!*2}, {b:b32!*1}, {c:b32*4}";
    mma_s4_m8 6.5 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m8n8k32.row.col{.satfinite}.s32.<u4|s4>.<u4|s4>.s32  {d:b32*2}, {a:b32!*1}, {b:b32!*1}, {c:b32*2}";
    mma_s4_k32 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col{.satfinite}.s32.<u4|s4>.<u4|s4>.s32  {d:b32*4}, {a:b32!*2}, {b:b32!*1}, {c:b32*4}";
    mma_s4_k64 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k64.row.col{.satfinite}.s32.<u4|s4>.<u4|s4>.s32  {d:b32*4}, {a:b32!*4}, {b:b32!*2}, {c:b32*4}";
    mma_f64 7.0 ALL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64  {d:f64*2}, {a:f64!*1}, {b:f64!*1}, {c:f64*2}";
    mma_f64_k4 7.8 SM90_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64  {d:f64*4}, {a:f64!*2}, {b:f64!*1}, {c:f64*4}";
    mma_f64_k8 7.8 SM90_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64  {d:f64*4}, {a:f64!*4}, {b:f64!*2}, {c:f64*4}";
    mma_f64_k16 7.8 SM90_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64  {d:f64*4}, {a:f64!*8}, {b:f64!*4}, {c:f64*4}";
    mma_f8 8.4 SM89_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.f32.<e4m3|e5m2>.<e4m3|e5m2>.f32  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}";
    mma_f8_half 8.7 SM89_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.f16.<e4m3|e5m2>.<e4m3|e5m2>.f16  {d:b32*2}, {a:b32!*4}, {b:b32!*2}, {c:b32*2}";
    mma_f8_k16 8.7 SM89_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k16.row.col.f32.<e4m3|e5m2>.<e4m3|e5m2>.f32  {d:f32*4}, {a:b32!*2}, {b:b32!*1}, {c:f32*4}";
    mma_f8_k16_half 8.7 SM89_UP "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k16.row.col.f16.<e4m3|e5m2>.<e4m3|e5m2>.f16  {d:b32*2}, {a:b32!*2}, {b:b32!*1}, {c:b32*2}";
    mma_kind_f8 8.6 BLACKWELL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.<e4m3|e5m2>.<e4m3|e5m2>.f32  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}";
    mma_kind_f8_f6f4 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.<e4m3|e5m2>.<e3m2|e2m3|e2m1>.f32  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}";
    mma_kind_f6f4 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.<e3m2|e2m3|e2m1>.<e4m3|e5m2|e3m2|e2m3|e2m1>.f32  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}";
    mma_kind_f8_half 8.7 BLACKWELL "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.<e4m3|e5m2>.<e4m3|e5m2>.f16  {d:b32*2}, {a:b32!*4}, {b:b32!*2}, {c:b32*2}";
    mma_kind_f8_f6f4_half 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.<e4m3|e5m2>.<e3m2|e2m3|e2m1>.f16  {d:b32*2}, {a:b32!*4}, {b:b32!*2}, {c:b32*2}";
    mma_kind_f6f4_half 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.<e3m2|e2m3|e2m1>.<e4m3|e5m2|e3m2|e2m3|e2m1>.f16  {d:b32*2}, {a:b32!*4}, {b:b32!*2}, {c:b32*2}";
    mma_mxf8f6f4 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale{.scale_vec::1X}.f32.<e4m3|e5m2|e3m2|e2m3|e2m1>.<e4m3|e5m2|e3m2|e2m3|e2m1>.f32.ue8m0  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}, sa:b32!, {byte_a:u16, thread_a:u16}, sb:b32!, {byte_b:u16, thread_b:u16}";
    mma_mxf4 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k64.row.col.kind::<mxf4|mxf4nvf4>.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}, sa:b32!, {byte_a:u16, thread_a:u16}, sb:b32!, {byte_b:u16, thread_b:u16}";
    mma_nvf4 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}, sa:b32!, {byte_a:u16, thread_a:u16}, sb:b32!, {byte_b:u16, thread_b:u16}";
    mma_nvf4_kind_first 8.7 SM120 "warp-level-matrix-instructions-mma" "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3  {d:f32*4}, {a:b32!*4}, {b:b32!*2}, {c:f32*4}, sa:b32!, {byte_a:u16, thread_a:u16}, sb:b32!, {byte_b:u16, thread_b:u16}";
}
