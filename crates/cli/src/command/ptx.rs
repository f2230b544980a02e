//! `ptx --kernel NAME --arch ARCH`: the text of a GPU kernel, as a device would get it.

use std::collections::BTreeSet;

use anyhow::{anyhow, bail};
use clap::Args;
use dualgemm::gemm::Activation;
use dualgemm_kernels::registry::{KERNELS, Kernel};
use serde_json::{Value, json};

use super::Verdict;
use crate::report::Output;

/// What the parts of names mean, for `--help`; `docs/glossary.md` has the words.
const NAMES: &str = "\
Names of configurations are ARCHITECTURE_KERNEL_TILE and then, as far as a kernel has them:
  64x16      the CTA's tile: weight rows by tokens, two rows (gate and up) to a feature;
             of warpwise, fp8 and sm120a: features by tokens
  b4         K blocks of 64 in a stage
  s3         stages of the ring; of warpwise, chunks that a warp has room for
  kg4        K groups: warpgroups (of warpwise, warps) that take different K blocks of the tile
  _split2    a cluster of two CTAs, each with half of K
  _common    a cluster of two CTAs that share one row group, half of its K each
  _2perSM    two CTAs fit on a multiprocessor
  w4x2       warps along weight rows by warps along tokens; a third number: K groups
  k256       K of a stage (sm120a)
  linear, 128x4  order of the block scales in memory
  sm100a:    tokens, features, halfatoms: what the 128 rows of a matrix instruction are; n64 its
             columns; g2 CTAs that execute it; k4 CTAs that split K; a2 pairs of accumulators";

/// Arguments of `ptx`.
#[derive(Debug, Args)]
#[command(after_long_help = NAMES)]
pub struct PtxArgs {
    /// Name of the kernel.
    #[arg(long, value_name = "NAME", required_unless_present = "list")]
    pub kernel: Option<String>,
    /// Architecture it is written for, as in .target: sm_90a.
    #[arg(long, value_name = "ARCH", required_unless_present = "list")]
    pub arch: Option<String>,
    /// Tile and pipeline; without it, the first that --list shows.
    #[arg(long, value_name = "NAME")]
    pub config: Option<String>,
    /// Activation [default: silu]; `dualgemm run --help` lists them.
    #[arg(long, value_name = "NAME")]
    pub activation: Option<Activation>,
    /// Write the kernel for N that is not a multiple of 8, where rows of C may start anywhere.
    #[arg(long)]
    pub unaligned: bool,
    /// List the kernels with their configurations and end; the parts of names are explained below (`ptx --help`).
    #[arg(long, conflicts_with_all = ["kernel", "arch"])]
    pub list: bool,
}

/// The kernel of that name for that architecture, or an error that lists those there are.
pub(super) fn find(name: &str, arch: &str) -> anyhow::Result<&'static Kernel> {
    KERNELS.iter().find(|k| (k.name, k.arch.as_str()) == (name, arch)).ok_or_else(|| {
        let archs = KERNELS.iter().filter(|k| k.name == name).map(|k| k.arch.as_str());
        match archs.collect::<Vec<_>>().as_slice() {
            [] => {
                let names: BTreeSet<&str> = KERNELS.iter().map(|k| k.name).collect();
                let names = names.into_iter().collect::<Vec<_>>().join(", ");
                anyhow!("--kernel {name}: there is no such kernel; there are {names}")
            }
            archs => anyhow!("--arch {arch}: kernel {name} is written for {}", archs.join(", ")),
        }
    })
}

/// How many configurations an unknown name is answered with.
const CLOSEST: usize = 4;

/// Refuses a configuration that none of these kernels has, and names those that share most parts of their name with it.
pub(super) fn check_config<'k>(
    asked: &str,
    kernels: impl IntoIterator<Item = &'k Kernel>,
) -> anyhow::Result<()> {
    let kernels: Vec<&Kernel> = kernels.into_iter().collect();
    let mut configs: Vec<String> = kernels.iter().flat_map(|kernel| kernel.configs()).collect();
    if configs.iter().any(|config| config == asked) {
        return Ok(());
    }
    if let Some(owner) = KERNELS.iter().find(|kernel| kernel.configs().iter().any(|config| config == asked)) {
        let takes: Vec<String> = kernels.iter().map(|k| format!("{:?} of {}", k.name, k.arch)).collect();
        bail!(
            "--config {asked}: belongs to the kernel {:?} of {}; this command runs {}",
            owner.name,
            owner.arch,
            takes.join(", ")
        );
    }
    let shared =
        |config: &String| asked.split('_').filter(|part| config.split('_').any(|p| p == *part)).count();
    configs.sort_by_key(|config| std::cmp::Reverse(shared(config)));
    let (count, closest) = (configs.len(), configs[..CLOSEST.min(configs.len())].join(", "));
    bail!(
        "--config {asked}: there is no such configuration; the closest of {count} are {closest}; see ptx --list"
    )
}

/// Prints a kernel.
pub fn run(args: &PtxArgs, output: &Output) -> anyhow::Result<Verdict> {
    let (Some(name), Some(arch)) = (&args.kernel, &args.arch) else {
        let entry = |k: &Kernel| {
            let (arch, configs) = (k.arch.as_str(), k.configs());
            let mut text = format!("--kernel {} --arch {arch}: {}\n", k.name, k.doc);
            text.extend(configs.iter().map(|config| format!("  --config {config}\n")));
            (json!({ "name": k.name, "arch": arch, "doc": k.doc, "configs": configs }), text)
        };
        let (kernels, text): (Vec<Value>, String) = KERNELS.iter().map(entry).unzip();
        output.say(&json!({ "kernels": kernels }), &text)?;
        return Ok(Verdict::Right);
    };
    let kernel = find(name, arch)?;
    args.config.iter().try_for_each(|config| check_config(config, [kernel]))?;
    let first = || kernel.configs().into_iter().next().unwrap_or_default();
    let config = args.config.clone().unwrap_or_else(first);
    if let Some(activation) = args.activation.filter(|_| !kernel.has_activation()) {
        bail!("--activation {activation}: kernel {name} for {arch} computes no activation; leave it out");
    }
    if args.unaligned && !kernel.has_unaligned() {
        bail!("--unaligned: kernel {name} for {arch} has the same text for every N; leave it out");
    }
    let activation = args.activation.unwrap_or_default();
    let ptx = kernel.generate(&config, &activation.program(), !args.unaligned)?.to_string();
    // None of a kernel that computes none.
    let activation = kernel.has_activation().then(|| activation.to_string());
    let document =
        json!({ "kernel": name, "arch": arch, "config": config, "activation": activation, "ptx": ptx });
    output.say(&document, &ptx)?;
    Ok(Verdict::Right)
}
