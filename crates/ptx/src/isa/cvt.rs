//! Conversions between number formats. Packed results put the first source in the upper half.

rows! { Cvt;
    cvt_int 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<T=u8|u16|u32|u64|s8|s16|s32|s64>.<S=u8|u16|u32|u64|s8|s16|s32|s64>  d:T~, a:S~";
    // Saturation is written only where the source has values the result lacks.
    cvt_sat_u8 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.u8.<S=u16|u32|u64|s8|s16|s32|s64>  d:u8~, a:S~";
    cvt_sat_u16 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.u16.<S=u32|u64|s8|s16|s32|s64>  d:u16~, a:S~";
    cvt_sat_u32 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.u32.<S=u64|s8|s16|s32|s64>  d:u32~, a:S~";
    cvt_sat_u64 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.u64.<S=s8|s16|s32|s64>  d:u64~, a:S~";
    cvt_sat_s8 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.s8.<S=u8|u16|u32|u64|s16|s32|s64>  d:s8~, a:S~";
    cvt_sat_s16 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.s16.<S=u16|u32|u64|s32|s64>  d:s16~, a:S~";
    cvt_sat_s32 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.s32.<S=u32|u64|s64>  d:s32~, a:S~";
    cvt_sat_s64 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.sat.s64.<S=u64>  d:s64~, a:S~";
    cvt_int_f32 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>{.ftz}{.sat}.<T=u8|u16|u32|u64|s8|s16|s32|s64>.f32  d:T~, a:f32";
    cvt_int_f16 4.2 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>{.sat}.<T=u8|u16|u32|u64|s8|s16|s32|s64>.f16  d:T~, a:f16!";
    cvt_int_f64 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>{.sat}.<T=u8|u16|u32|u64|s8|s16|s32|s64>.f64  d:T~, a:f64";
    cvt_int_bf16 7.8 SM90_UP "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>.<T=u16|u32|u64|s16|s32|s64>.bf16  d:T, a:bf16!";
    cvt_float_int 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz|rm|rp>.<T=f16|f32|f64>.<S=u8|u16|u32|u64|s8|s16|s32|s64>  d:T, a:S~";
    cvt_bf16_int 7.8 SM90_UP "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz|rm|rp>.bf16.<S=u16|u32|u64|s16|s32|s64>  d:bf16, a:S";
    cvt_f32_f16 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt{.ftz}{.sat}.f32.f16  d:f32, a:f16!";
    cvt_f16_f32 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz|rm|rp>{.ftz}{.sat}.f16.f32  d:f16, a:f32";
    cvt_f16_f32_relu 7.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz>.relu.f16.f32  d:f16, a:f32";
    cvt_f16_round 4.2 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>{.sat}.f16.f16  d:f16, a:f16!";
    cvt_f32_round 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>{.ftz}{.sat}.f32.f32  d:f32, a:f32";
    cvt_f32_sat 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt{.ftz}.sat.f32.f32  d:f32, a:f32";
    cvt_f64_round 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rni|rzi|rmi|rpi>.f64.f64  d:f64, a:f64";
    cvt_f64_float 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.f64.<S=f16|f32>  d:f64, a:S!";
    cvt_f32_f64 1.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz|rm|rp>{.sat}.<T=f16|f32>.f64  d:T, a:f64";
    cvt_f32_bf16 7.1 ALL "data-movement-and-conversion-instructions-cvt" "cvt.f32.bf16  d:f32, a:bf16!";
    cvt_bf16_f32 7.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz>{.relu}.bf16.f32  d:bf16, a:f32";
    cvt_x2_f32 7.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz>{.relu}.<T=f16x2|bf16x2>.f32  d:T, a:f32, b:f32";
    cvt_tf32_f32 7.0 ALL "data-movement-and-conversion-instructions-cvt" "cvt.rna.tf32.f32  d:tf32, a:f32";
    cvt_tf32_f32_rn 7.8 SM90_UP "data-movement-and-conversion-instructions-cvt" "cvt.<rn|rz>{.relu}.tf32.f32  d:tf32, a:f32";
    cvt_f8x2_f32 8.1 SM89_UP "data-movement-and-conversion-instructions-cvt" "cvt.rn.satfinite{.relu}.<T=e4m3x2|e5m2x2>.f32  d:T, a:f32, b:f32";
    cvt_f8x2_f16x2 8.1 SM89_UP "data-movement-and-conversion-instructions-cvt" "cvt.rn.satfinite{.relu}.<T=e4m3x2|e5m2x2>.f16x2  d:T, a:f16x2!";
    cvt_f16x2_f8x2 8.1 SM89_UP "data-movement-and-conversion-instructions-cvt" "cvt.rn{.relu}.f16x2.<S=e4m3x2|e5m2x2>  d:f16x2, a:S!";
    cvt_e2m1x2_f32 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.rn.satfinite{.relu}.e2m1x2.f32  d:e2m1x2, a:f32, b:f32";
    cvt_f16x2_e2m1x2 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.rn{.relu}.f16x2.e2m1x2  d:f16x2, a:e2m1x2!";
    cvt_f6x2_f32 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.rn.satfinite{.relu}.<T=e2m3x2|e3m2x2>.f32  d:T, a:f32, b:f32";
    cvt_f16x2_f6x2 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.rn{.relu}.f16x2.<S=e2m3x2|e3m2x2>  d:f16x2, a:S!";
    cvt_ue8m0x2_f32 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.<rz|rp>{.satfinite}.ue8m0x2.f32  d:ue8m0x2, a:f32, b:f32";
    cvt_ue8m0x2_bf16x2 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.<rz|rp>{.satfinite}.ue8m0x2.bf16x2  d:ue8m0x2, a:bf16x2!";
    cvt_bf16x2_ue8m0x2 8.6 BLACKWELL "data-movement-and-conversion-instructions-cvt" "cvt.rn.bf16x2.ue8m0x2  d:bf16x2, a:ue8m0x2!";
    cvt_rs_x2_f32 8.7 SM100_ARCH "data-movement-and-conversion-instructions-cvt" "cvt.rs{.relu}.<T=f16x2|bf16x2>.f32  d:T, a:f32, b:f32, bits:b32";
    cvt_rs_f8x4_f32 8.7 SM100_ARCH "data-movement-and-conversion-instructions-cvt" "cvt.rs{.relu}.satfinite.<T=e4m3x4|e5m2x4>.f32  d:T, {a:f32*4}, bits:b32";
    cvt_rs_e2m1x4_f32 8.7 SM100_ARCH "data-movement-and-conversion-instructions-cvt" "cvt.rs{.relu}.satfinite.e2m1x4.f32  d:e2m1x4, {a:f32*4}, bits:b32";
    cvt_pack_16 6.5 ALL "data-movement-and-conversion-instructions-cvt-pack" "cvt.pack.sat.<u16|s16>.s32  d:b32, a:s32, b:s32";
    cvt_pack_8 6.5 ALL "data-movement-and-conversion-instructions-cvt-pack" "cvt.pack.sat.<u2|s2|u4|s4|u8|s8>.s32.b32  d:b32, a:s32, b:s32, c:b32";
}
