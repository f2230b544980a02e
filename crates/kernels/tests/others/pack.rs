//! The GPU's weight pack against the host's.

use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::GateUp;
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::sm90a::pack::Pack;

use crate::common::*;

#[test]
fn the_gpus_pack_has_the_hosts_bytes_exact() {
    let gpu = gpu();
    for layout in ScaleLayout::ALL {
        let kernel = GpuPack::new(gpu, layout).unwrap();
        for (n, k) in [(32, 64), (1, 16), (33, 80), (70, 208)] {
            let weights = GateUp::new(quantized("gate", (n, k), layout), quantized("up", (n, k), layout));
            let [gate, up] = [&weights.gate, &weights.up].map(|half| upload_codes(gpu, half));
            let got = made(gpu, GpuPack::bytes(n, k), |out| kernel.spec(&gate, &up, out));
            assert!(got == Pack::new(&weights).unwrap().bytes(), "{layout} [{n}, {k}]");
        }
    }
}

#[test]
fn halves_that_differ_are_refused() {
    let gpu = gpu();
    let kernel = GpuPack::new(gpu, ScaleLayout::Linear).unwrap();
    let gate = upload_codes(gpu, &quantized("gate", (32, 64), ScaleLayout::Linear));
    let up = upload_codes(gpu, &quantized("up", (32, 128), ScaleLayout::Linear));
    let message = kernel.spec(&gate, &up, gate.codes).unwrap_err().to_string();
    assert!(message.contains("gate is [32, 64], rows of 32 bytes"), "{message}");
}
