//! Fifth-generation tensor cores of sm_100a, sm_100f and sm_103a: tensor memory and the instructions on it.

rows! { Tcgen05;
    tcgen05_alloc 8.6 SM100 "tcgen05-instructions-tcgen05-alloc-dealloc-relinquish-alloc-permit" "tcgen05.alloc.cta_group::<1|2>.sync.aligned{.<S=shared::cta>}.b32  [d:S], n:u32";
    tcgen05_dealloc 8.6 SM100 "tcgen05-instructions-tcgen05-alloc-dealloc-relinquish-alloc-permit" "tcgen05.dealloc.cta_group::<1|2>.sync.aligned.b32  t:b32!, n:u32";
    tcgen05_relinquish 8.6 SM100 "tcgen05-instructions-tcgen05-alloc-dealloc-relinquish-alloc-permit" "tcgen05.relinquish_alloc_permit.cta_group::<1|2>.sync.aligned";
    tcgen05_ld_32x32b 8.6 SM100 "tcgen05-instructions-tcgen05-ld" "tcgen05.ld.sync.aligned.<32x32b|16x64b>.x<N=1|2|4|8|16|32|64|128>{.pack::16b}.b32  {d:b32*N}, [t:tmem]";
    tcgen05_ld_16x128b 8.6 SM100 "tcgen05-instructions-tcgen05-ld" "tcgen05.ld.sync.aligned.16x128b.x<N=1|2|4|8|16|32|64>{.pack::16b}.b32  {d:b32*N*2}, [t:tmem]";
    tcgen05_ld_16x256b 8.6 SM100 "tcgen05-instructions-tcgen05-ld" "tcgen05.ld.sync.aligned.16x256b.x<N=1|2|4|8|16|32>{.pack::16b}.b32  {d:b32*N*4}, [t:tmem]";
    tcgen05_ld_16x32bx2 8.6 SM100 "tcgen05-instructions-tcgen05-ld" "tcgen05.ld.sync.aligned.16x32bx2.x<N=1|2|4|8|16|32|64|128>{.pack::16b}.b32  {d:b32*N}, [t:tmem], offset:#";
    tcgen05_st_32x32b 8.6 SM100 "tcgen05-instructions-tcgen05-st" "tcgen05.st.sync.aligned.<32x32b|16x64b>.x<N=1|2|4|8|16|32|64|128>{.unpack::16b}.b32  [t:tmem], {b:b32!*N}";
    tcgen05_st_16x128b 8.6 SM100 "tcgen05-instructions-tcgen05-st" "tcgen05.st.sync.aligned.16x128b.x<N=1|2|4|8|16|32|64>{.unpack::16b}.b32  [t:tmem], {b:b32!*N*2}";
    tcgen05_st_16x256b 8.6 SM100 "tcgen05-instructions-tcgen05-st" "tcgen05.st.sync.aligned.16x256b.x<N=1|2|4|8|16|32>{.unpack::16b}.b32  [t:tmem], {b:b32!*N*4}";
    tcgen05_st_16x32bx2 8.6 SM100 "tcgen05-instructions-tcgen05-st" "tcgen05.st.sync.aligned.16x32bx2.x<N=1|2|4|8|16|32|64|128>{.unpack::16b}.b32  [t:tmem], offset:#, {b:b32!*N}";
    tcgen05_wait 8.6 SM100 "tcgen05-instructions-tcgen05-wait" "tcgen05.wait::<ld|st>.sync.aligned";
    tcgen05_cp 8.6 SM100 "tcgen05-instructions-tcgen05-cp" "tcgen05.cp.cta_group::<1|2>.<128x256b|4x256b|128x128b>{.b8x16.<b6x16_p32|b4x16_p64>}  [t:tmem], s:b64!";
    tcgen05_cp_warpx2 8.6 SM100 "tcgen05-instructions-tcgen05-cp" "tcgen05.cp.cta_group::<1|2>.64x128b.warpx2::<02_13|01_23>{.b8x16.<b6x16_p32|b4x16_p64>}  [t:tmem], s:b64!";
    tcgen05_cp_warpx4 8.6 SM100 "tcgen05-instructions-tcgen05-cp" "tcgen05.cp.cta_group::<1|2>.32x128b.warpx4{.b8x16.<b6x16_p32|b4x16_p64>}  [t:tmem], s:b64!";
    tcgen05_shift 8.6 SM100_ARCH "tcgen05-instructions-tcgen05-shift" "tcgen05.shift.cta_group::<1|2>.down  [t:tmem]";
    tcgen05_commit 8.6 SM100 "tcgen05-instructions-tcgen05-commit" "tcgen05.commit.cta_group::<1|2>.mbarrier::arrive::one{.<S=shared::cluster>}{M:.multicast::cluster}.b64  [m:S], M?mask:b16";
    tcgen05_fence 8.6 SM100 "tcgen05-instructions-tcgen05-fence" "tcgen05.fence::<before_thread_sync|after_thread_sync>";

    // The instruction descriptor `i` gives shape and types; `p` false ignores D.
    tcgen05_mma_ss 8.6 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::<f16|tf32|f8f6f4>{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, p:pred!";
    tcgen05_mma_ts 8.6 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::<f16|tf32|f8f6f4>{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, p:pred!";
    tcgen05_mma_ss_masked 8.6 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<G=1|2>.kind::<f16|tf32|f8f6f4>{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, {mask:b32!*G*4}, p:pred!";
    tcgen05_mma_ts_masked 8.6 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<G=1|2>.kind::<f16|tf32|f8f6f4>{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, {mask:b32!*G*4}, p:pred!";
    tcgen05_mma_scaled_d 8.6 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::<f16|tf32>{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, p:pred!, scale:#0..15";
    tcgen05_mma_i8 8.6 SM100A "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::i8{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, p:pred!";
    tcgen05_mma_i8_ts 8.6 SM100A "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::i8{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, p:pred!";
    tcgen05_mma_i8_masked 8.6 SM100A "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<G=1|2>.kind::i8{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, {mask:b32!*G*4}, p:pred!";
    tcgen05_mma_i8_ts_masked 8.6 SM100A "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<G=1|2>.kind::i8{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, {mask:b32!*G*4}, p:pred!";
    tcgen05_mma_mxf8f6f4 8.8 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf8f6f4.block_scale{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_mxf8f6f4_1x 8.6 SM100_ARCH "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf8f6f4.block_scale.scale_vec::1X{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_mxf4 8.8 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4.block_scale{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_mxf4_2x 8.6 SM100_ARCH "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4.block_scale.scale_vec::2X{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_nvf4_2x 8.7 SM100_ARCH "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4nvf4.block_scale.scale_vec::2X{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_nvf4_4x 8.7 SM100_ARCH "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4nvf4.block_scale.scale_vec::4X{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_nvf4_4x_ts 8.7 SM100_ARCH "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4nvf4.block_scale.scale_vec::4X{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_block16 8.8 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4nvf4.block_scale.block16{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_block16_ts 8.8 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::mxf4nvf4.block_scale.block16{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_block32 8.8 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::<mxf8f6f4|mxf4|mxf4nvf4>.block_scale.block32{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], a:b64!, b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
    tcgen05_mma_block32_ts 8.8 SM100 "tcgen05-instructions-tcgen05-mma" "tcgen05.mma.cta_group::<1|2>.kind::<mxf8f6f4|mxf4|mxf4nvf4>.block_scale.block32{.collector::a::<fill|use|lastuse|discard>}  [d:tmem], [a:tmem], b:b64!, i:b32!, [sa:tmem], [sb:tmem], p:pred!";
}
