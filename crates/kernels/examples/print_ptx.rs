//! Prints the PTX of a configuration of the fused Hopper kernel:
//! `cargo run -p dualgemm-kernels --example print_ptx -- ROW_GROUPS TOKENS BLOCKS_PER_STAGE STAGES K_GROUPS`.

use dualgemm_gemm::Activation;
use dualgemm_kernels::sm90a::{config::Config, fused};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<u32> = std::env::args().skip(1).map(|n| n.parse()).collect::<Result<_, _>>()?;
    let [row_groups, tokens, blocks_per_stage, stages, k_groups] = numbers[..] else {
        return Err("five numbers: row groups, tokens, blocks per stage, stages, K groups".into());
    };
    let config = Config { row_groups, tokens, blocks_per_stage, stages, k_groups };
    print!("{}", fused::generate(&config, &Activation::Silu.program(), true)?);
    Ok(())
}
