//! `docs/kernels/anatomy.md` shows the Rust that there is and the PTX that it makes.

use dualgemm_gemm::Activation;
use dualgemm_kernels::registry::KERNELS;

const PAGE: &str = include_str!("../../../../docs/kernels/anatomy.md");
const SOURCES: [&str; 3] = [
    include_str!("../../src/fp8/fused.rs"),
    include_str!("../../src/parts/ring.rs"),
    include_str!("../../src/parts/tma_tiles.rs"),
];

/// Lines without indentation.
fn flat(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join("\n")
}

fn pieces(language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    let blocks = PAGE.split(&fence).skip(1);
    blocks.map(|block| flat(block.split("\n```").next().unwrap())).collect()
}

#[test]
fn the_page_shows_what_there_is() {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == "fp8").unwrap();
    let module = kernel.generate("sm90a_fp8_64x16_s10", &Activation::Silu.program(), true).unwrap();
    let text = flat(&module.to_string());
    let sources = SOURCES.map(flat);
    let (ptx, rust) = (pieces("ptx"), pieces("rust"));
    assert_eq!((ptx.len(), rust.len()), (3, 3));
    for piece in ptx {
        assert!(text.contains(&piece), "the kernel has no\n{piece}");
    }
    for piece in rust {
        assert!(sources.iter().any(|source| source.contains(&piece)), "no source has\n{piece}");
    }
}
