//! Prints the PTX of a configuration of the fused Hopper kernel:
//! `cargo run -p dualgemm-kernels --example print_ptx -- ROW_GROUPS TOKENS BLOCKS_PER_STAGE STAGES K_GROUPS CTAS_PER_SM SCHEDULER`,
//! the scheduler being grid, persistent, stream-k or split (grid, two CTAs split K).

use dualgemm_gemm::Activation;
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::fused;
use dualgemm_kernels::sm90a::variant::{Scheduler, Variant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let scheduler = match args.pop().as_deref() {
        Some("grid") => Some(Scheduler::Grid),
        Some("persistent") => Some(Scheduler::Persistent),
        Some("stream-k") => Some(Scheduler::StreamK),
        Some("split") => None,
        _ => return Err("the last argument is grid, persistent, stream-k or split".into()),
    };
    let numbers: Vec<u32> = args.iter().map(|n| n.parse()).collect::<Result<_, _>>()?;
    let [row_groups, tokens, blocks_per_stage, stages, k_groups, ctas_per_sm] = numbers[..] else {
        return Err("six numbers: row groups, tokens, blocks per stage, stages, K groups, CTAs per SM".into());
    };
    let config = Config::new(row_groups, tokens, blocks_per_stage, stages, k_groups);
    let config = if ctas_per_sm == 2 { config.two_per_sm() } else { config };
    let (config, scheduler) = match scheduler {
        None => (config.split_k(), Scheduler::Grid),
        Some(scheduler) => (config, scheduler),
    };
    let variant = Variant { scheduler, ..Variant::new(Activation::Silu.program()) }.for_weights(4096, 7168);
    print!("{}", fused::generate(&config, &variant)?);
    Ok(())
}
