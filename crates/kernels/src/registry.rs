//! Every kernel of this crate, as a list. To add a kernel, add a row.

use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::{Activation, Program};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;

use crate::error::one_of;
use crate::generic::dequantize::Dequantize;
use crate::generic::expand::Expand;
use crate::generic::quantize::Quantize;
use crate::generic::silu_mul::SiluMul;
use crate::generic::{amax, atoms, copy, mixture, pack, rowwise};
use crate::parts::format::Formats;
use crate::parts::rows;
use crate::sm90a::{config::Config, fused, variant::Variant};
use crate::{Error, fp8, plain, sm80, sm100a, sm120a, warpwise};

/// A kernel that can be generated.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Its name, unique for its architecture.
    pub name: &'static str,
    /// What it computes, in one line.
    pub doc: &'static str,
    /// What it is written for.
    pub arch: Target,
    /// The names of its configurations.
    pub configs: fn() -> Vec<String>,
    /// See [`generate`](Self::generate).
    text: Text,
}

/// How the text of a configuration is made, by what it depends on.
#[derive(Debug, Clone, Copy)]
enum Text {
    /// On the activation, and on whether rows of C are aligned.
    Product(fn(&str, &Program, bool) -> Result<Module, Error>),
    /// On the activation.
    Gated(fn(&str, &Program) -> Result<Module, Error>),
    /// On nothing else.
    Fixed(fn(&str) -> Result<Module, Error>),
}

impl Kernel {
    /// Whether it computes an activation.
    pub fn has_activation(&self) -> bool {
        !matches!(self.text, Text::Fixed(_))
    }

    /// Whether it has a text of its own for rows of C that start anywhere.
    pub fn has_unaligned(&self) -> bool {
        matches!(self.text, Text::Product(_))
    }

    /// Its text for an activation, if it computes one; `aligned` promises that rows of C start at multiples of 16 bytes (N is
    /// a multiple of 8).
    pub fn generate(&self, config: &str, program: &Program, aligned: bool) -> Result<Module, Error> {
        one_of(config, (self.configs)(), String::clone)?;
        match self.text {
            Text::Product(text) => text(config, program, aligned),
            Text::Gated(text) => text(config, program),
            Text::Fixed(text) => text(config),
        }
    }
}

/// Every kernel.
pub const KERNELS: &[Kernel] = &[
    Kernel {
        name: "fused",
        doc: "C = act(A B1^T, A B2^T): 4-bit weights widened to f16 in registers, f16 A and C",
        arch: Target::Sm90a,
        configs: || Config::MENU.map(|config| config.name()).into(),
        text: Text::Product(|config, program, aligned| {
            let variant = Variant { aligned, whole_blocks: true, ..Variant::new(program.clone()) };
            fused::generate(&Config::named(config)?, &variant)
        }),
    },
    Kernel {
        name: "warpwise",
        doc: "the same for up to 16 tokens, each warp with weights of its own by mma.sync",
        arch: Target::Sm90a,
        configs: || warpwise::config::Config::menu().map(|config| config.name()).collect(),
        text: Text::Product(|config, program, aligned| {
            let rows = f16_rows(program, aligned);
            let a = warpwise::fused::A::Half(HalfFormat::F16);
            let variant = warpwise::fused::Variant { a, whole_blocks: true, linear: false, rows };
            warpwise::fused::generate(&warpwise::config::Config::named(config)?, &variant)
        }),
    },
    Kernel {
        name: "plain",
        doc: "the same on weights as a checkpoint has them, without prepack",
        arch: Target::Sm90a,
        configs: || plain::config::Config::menu().map(|config| config.name()).collect(),
        text: Text::Product(|config, program, aligned| {
            plain::fused::generate(&plain::config::Config::named(config)?, &f16_rows(program, aligned))
        }),
    },
    Kernel {
        name: "fp8",
        doc: "the same on e4m3 operands, f16 C",
        arch: Target::Sm90a,
        configs: || fp8::config::Config::MENU.map(|config| config.name()).into(),
        text: Text::Product(|config, program, aligned| {
            fp8::fused::generate(&fp8::config::Config::named(config)?, &f16_rows(program, aligned))
        }),
    },
    Kernel {
        name: "fused",
        doc: "the same by mma.sync on the pack of sm_90a, f16 A and C",
        arch: Target::Sm80,
        configs: || sm80::config::Config::MENU.map(|config| config.name()).into(),
        text: Text::Product(|config, program, aligned| {
            let variant = sm80::fused::Variant {
                compute: HalfFormat::F16,
                linear: false,
                rows: f16_rows(program, aligned),
            };
            sm80::fused::generate(&sm80::config::Config::named(config)?, &variant, Target::Sm80)
        }),
    },
    SM100,
    SM103,
    Kernel { name: "fused_mxfp4", doc: MXFP4, configs: || sm100_names(&[Formats::MXFP4]), ..SM100 },
    Kernel { name: "fused_mxfp4", doc: MXFP4, configs: || sm100_names(&[Formats::MXFP4]), ..SM103 },
    Kernel { name: "fused_w4a16", doc: W4A16, configs: || sm100_names(&WIDE), ..SM100 },
    Kernel { name: "fused_w4a16", doc: W4A16, configs: || sm100_names(&WIDE), ..SM103 },
    SM120,
    SM121,
    Kernel { name: "fused_mxfp4", doc: MXFP4, configs: || sm120_names(BlockFormat::Mxfp4), ..SM120 },
    Kernel { name: "fused_mxfp4", doc: MXFP4, configs: || sm120_names(BlockFormat::Mxfp4), ..SM121 },
    Kernel {
        name: "expand",
        doc: "nvfp4 to code times scale as f16 or bf16, exactly, or rounded to e4m3",
        arch: Target::Sm80,
        configs: || names(Expand::configs()),
        text: Text::Fixed(|config| ungated(config, Expand::configs())),
    },
    Kernel {
        name: "quantize",
        doc: "floats to nvfp4, to the floats that it stands for, or to e4m3",
        arch: Target::Sm80,
        configs: || names(Quantize::configs()),
        text: Text::Fixed(|config| ungated(config, Quantize::configs())),
    },
    Kernel {
        name: "amax",
        doc: "the largest magnitude of a float matrix, in parts, of rows in groups too",
        arch: Target::Sm80,
        configs: || amax::configs().iter().map(amax::name).collect(),
        text: Text::Fixed(|config| {
            let (ty, grouped) = one_of(config, amax::configs(), amax::name)?;
            amax::generate(ty, grouped, Target::Sm80)
        }),
    },
    Kernel {
        name: "silu_mul",
        doc: "act(gate, up) of two float matrices",
        arch: Target::Sm80,
        configs: || names(SiluMul::configs()),
        text: Text::Gated(|config, program| elementwise(config, SiluMul::configs(), program)),
    },
    Kernel {
        name: "dequantize",
        doc: "nvfp4 to floats, tensor scale included",
        arch: Target::Sm80,
        configs: || names(Dequantize::configs()),
        text: Text::Fixed(|config| ungated(config, Dequantize::configs())),
    },
    Kernel {
        name: "scale_atoms",
        doc: "block scales to 128x4 atoms, of rows in groups too",
        arch: Target::Sm80,
        configs: || atoms::configs().iter().map(atoms::name).collect(),
        text: Text::Fixed(|config| {
            let (layout, grouped) = one_of(config, atoms::configs(), atoms::name)?;
            atoms::generate(layout, grouped, Target::Sm80)
        }),
    },
    Kernel {
        name: "copy",
        doc: "bytes as they are, from memory of others too",
        arch: Target::Sm80,
        configs: || vec!["bytes".into()],
        text: Text::Fixed(|config| {
            one_of(config, ["bytes"], |name| (*name).into())?;
            copy::generate(Target::Sm80)
        }),
    },
    Kernel {
        name: "mixture",
        doc: "rows sorted by expert, and the weighted sum of what experts make of them",
        arch: Target::Sm80,
        configs: || mixture::Step::all().into_iter().map(mixture::Step::name).collect(),
        text: Text::Fixed(|config| {
            mixture::generate(one_of(config, mixture::Step::all(), |step| step.name())?, Target::Sm80)
        }),
    },
    Kernel {
        name: "pack",
        doc: "the weight pack of sm_90a from a checkpoint's layout",
        arch: Target::Sm80,
        configs: || ScaleLayout::ALL.map(|layout| layout.to_string()).into(),
        text: Text::Fixed(|config| {
            pack::generate(one_of(config, ScaleLayout::ALL, |layout| layout.to_string())?, Target::Sm80)
        }),
    },
];

/// Which fused kernels were seen to be right on which card: the start of their configurations' names, the card, and the
/// record of it in `benchmarks/record`. Whatever has no row was simulated and assembled, no more.
pub const SEEN: &[(&str, &str, &str)] = &[
    ("sm80_fused", "H100", "h100-2026-11-28.csv"),
    ("sm80_fused", "H200", "h200-other-kernels-2026-11-28.csv"),
    ("sm90a_fused", "H100", "h100-2026-11-28.csv"),
    ("sm90a_fused", "H200", "h100-2026-11-28.md"),
    ("sm90a_warpwise", "H200", "h200-decode-2026-11-29.md"),
    ("sm90a_plain", "H100", "h100-2026-11-28.csv"),
    ("sm90a_plain", "H200", "h200-other-kernels-2026-11-28.csv"),
    ("sm90a_fp8", "H100", "h100-2026-11-28.csv"),
    ("sm90a_fp8", "H200", "h200-other-kernels-2026-11-28.csv"),
];

/// The cards that a configuration's kernel was seen on.
pub fn seen_on(config: &str) -> Vec<&'static str> {
    let rows = SEEN.iter().filter(|(kernel, ..)| config.starts_with(kernel));
    rows.map(|&(_, card, _)| card).collect()
}

/// What is said of kernels for cards that could not be had.
const BLACKWELL: &str =
    "C = act(A B1^T, A B2^T): nvfp4 operands on FP4 tensor cores, f16 C; simulated, not yet run on silicon";
const MXFP4: &str = "the same on mxfp4 operands; simulated, not yet run on silicon";
const W4A16: &str = "the same on f16 or bf16 A, nvfp4 weights widened to that on their way to the tensor core, C as A; \
                     simulated, not yet run on silicon";

/// A's formats of the kernels that widen weights.
const WIDE: [Formats; 2] = [Formats::Wide(HalfFormat::F16), Formats::Wide(HalfFormat::Bf16)];

const SM100: Kernel = Kernel {
    name: "fused",
    doc: BLACKWELL,
    arch: Target::Sm100a,
    configs: || sm100_names(&[Formats::NVFP4]),
    text: Text::Product(|config, program, aligned| generate_sm100(config, program, aligned, Target::Sm100a)),
};
const SM103: Kernel = Kernel {
    arch: Target::Sm103a,
    text: Text::Product(|config, program, aligned| generate_sm100(config, program, aligned, Target::Sm103a)),
    ..SM100
};
const SM120: Kernel = Kernel {
    arch: Target::Sm120a,
    configs: || sm120_names(BlockFormat::Nvfp4),
    text: Text::Product(|config, program, aligned| generate_sm120(config, program, aligned, Target::Sm120a)),
    ..SM100
};
const SM121: Kernel = Kernel {
    arch: Target::Sm121a,
    text: Text::Product(|config, program, aligned| generate_sm120(config, program, aligned, Target::Sm121a)),
    ..SM120
};

fn sm100_names(formats: &[Formats]) -> Vec<String> {
    let menus = formats.iter().flat_map(|&formats| sm100a::config::Config::menu(formats));
    menus.map(|config| config.name()).collect()
}

fn sm120_names(format: BlockFormat) -> Vec<String> {
    sm120a::config::Config::menu(format).map(|config| config.name()).into()
}

fn generate_sm100(name: &str, program: &Program, aligned: bool, arch: Target) -> Result<Module, Error> {
    let config = sm100a::config::Config::named(name)?;
    let out = match config.formats {
        Formats::Wide(HalfFormat::Bf16) => rows::Out::Bf16,
        Formats::Wide(HalfFormat::F16) | Formats::Scaled(_) => rows::Out::F16,
    };
    let variant = rows::Variant { out, ..f16_rows(program, aligned) };
    sm100a::fused::generate(&config, &variant, arch)
}

fn generate_sm120(name: &str, program: &Program, aligned: bool, arch: Target) -> Result<Module, Error> {
    sm120a::fused::generate(&sm120a::config::Config::named(name)?, &f16_rows(program, aligned), arch)
}

/// C in f16, nothing added.
fn f16_rows(program: &Program, aligned: bool) -> rows::Variant {
    rows::Variant { aligned, ..rows::Variant::new(program.clone()) }
}

fn names(configs: Vec<rowwise::Config>) -> Vec<String> {
    configs.iter().map(rowwise::Config::name).collect()
}

/// Those that compute no activation; the generator asks for one.
fn ungated(name: &str, configs: Vec<rowwise::Config>) -> Result<Module, Error> {
    elementwise(name, configs, &Activation::Identity.program())
}

fn elementwise(name: &str, configs: Vec<rowwise::Config>, program: &Program) -> Result<Module, Error> {
    rowwise::generate(&one_of(name, configs, rowwise::Config::name)?, program, Target::Sm80)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_kernel_generates_every_configuration_under_a_name_of_its_own() {
        let mut seen = HashSet::new();
        for kernel in KERNELS {
            for config in (kernel.configs)() {
                let module = kernel.generate(&config, &Activation::Silu.program(), true).unwrap();
                let target = format!(".target {}", kernel.arch);
                let text = module.to_string();
                assert!(text.contains(&target), "{} {config}", kernel.name);
                assert!(text.contains("st.global"), "{} {config} leaves no result", kernel.name);
                assert!(seen.insert((kernel.arch, kernel.name, config)));
            }
            let (config, silu) = ((kernel.configs)().remove(0), Activation::Silu.program());
            let text = |program: &Program, aligned| kernel.generate(&config, program, aligned).unwrap();
            let (one, other) = (text(&silu, true), text(&Activation::SWIGLU_OAI.program(), true));
            assert_eq!(one != other, kernel.has_activation(), "{}", kernel.name);
            assert_eq!(one != text(&silu, false), kernel.has_unaligned(), "{}", kernel.name);
            let message = kernel.generate("none", &Activation::Silu.program(), true).unwrap_err().to_string();
            assert!(message.contains(&(kernel.configs)()[0]), "{message}");
        }
    }

    /// A file of the repository.
    fn text(path: &str) -> String {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        std::fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    #[test]
    fn a_card_is_named_where_a_record_has_it() {
        for (kernel, card, record) in SEEN {
            let text = text(&format!("benchmarks/record/{record}"));
            // Prose speaks of strategies, tables of configurations.
            let has = |line: &str| line.contains(card) && (record.ends_with(".md") || line.contains(kernel));
            assert!(text.lines().any(has), "{kernel} on {card}: {record}");
        }
    }

    #[test]
    fn what_is_said_of_silicon_is_what_the_table_has() {
        const UNSEEN: &str = "not yet run on silicon";
        let readme = text("README.md");
        for kernel in KERNELS.iter().filter(|kernel| kernel.has_unaligned()) {
            let config = (kernel.configs)().remove(0);
            let cards = seen_on(&config);
            assert_eq!(kernel.doc.contains(UNSEEN), cards.is_empty(), "{} {}", kernel.arch, kernel.name);
            let family: Vec<&str> = config.split('_').take(2).collect();
            let family = format!("`{}_*`", family.join("_"));
            let Some(row) = readme.lines().find(|line| line.contains(&family)) else { continue };
            assert_eq!(row.contains(UNSEEN), cards.is_empty(), "{row}");
            assert!(cards.iter().all(|card| row.contains(card)), "{row}");
        }
    }
}
