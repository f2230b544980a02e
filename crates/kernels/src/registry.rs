//! Every kernel of this crate, as a list. To add a kernel, add a row.

use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::{Activation, Program};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;

use crate::error::one_of;
use crate::fused::Config;
use crate::generic::expand::Expand;
use crate::generic::quantize::Quantize;
use crate::generic::silu_mul::SiluMul;
use crate::generic::{amax, atoms, copy, mixture, pack, rowwise};
use crate::parts::format::Formats;
use crate::parts::variant::{Out, Variant};
use crate::{Error, fp8, plain, sm80, sm90a, sm100a, sm120a, warpwise};

/// A kernel that can be generated.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Its name, unique for its architecture.
    pub name: &'static str,
    /// What it computes, in one line.
    pub doc: &'static str,
    /// What it is written for.
    pub arch: Target,
    menu: Menu,
}

/// A configuration's name, and what makes its text.
type Named = (String, Box<dyn Fn(Target) -> Result<Module, Error>>);

/// Configurations, by what their texts depend on.
#[derive(Debug, Clone, Copy)]
enum Menu {
    /// On the activation, and on whether rows of C are aligned.
    Fused(fn() -> Vec<Config>),
    /// On the activation.
    Gated(fn() -> Vec<rowwise::Config>),
    /// On nothing else.
    Fixed(fn() -> Vec<Named>),
}

impl Kernel {
    /// The names of its configurations.
    pub fn configs(&self) -> Vec<String> {
        match self.menu {
            Menu::Fused(configs) => configs().iter().map(Config::name).collect(),
            Menu::Gated(configs) => configs().iter().map(rowwise::Config::name).collect(),
            Menu::Fixed(configs) => configs().into_iter().map(|(name, _)| name).collect(),
        }
    }

    /// Its configurations, if it is a fused kernel.
    pub(crate) fn fused(&self) -> Vec<Config> {
        match self.menu {
            Menu::Fused(configs) => configs(),
            Menu::Gated(_) | Menu::Fixed(_) => Vec::new(),
        }
    }

    /// Whether it computes an activation.
    pub fn has_activation(&self) -> bool {
        !matches!(self.menu, Menu::Fixed(_))
    }

    /// Whether it has a text of its own for rows of C that start anywhere.
    pub fn has_unaligned(&self) -> bool {
        matches!(self.menu, Menu::Fused(_))
    }

    /// Its text for an activation, if it computes one; `aligned` promises that rows of C start at multiples of 16 bytes (N is
    /// a multiple of 8).
    pub fn generate(&self, config: &str, program: &Program, aligned: bool) -> Result<Module, Error> {
        match self.menu {
            Menu::Fused(configs) => {
                let config = one_of(config, configs(), Config::name)?;
                let variant = Variant { aligned, whole_blocks: true, ..Variant::new(program.clone()) };
                // C is what A is, where that has 16 bits.
                let bf16 =
                    matches!(&config, Config::Sm100a(c) if c.formats == Formats::Wide(HalfFormat::Bf16));
                let out = if bf16 { Out::Bf16 } else { Out::F16 };
                config.generate(&Variant { out, ..variant }, self.arch)
            }
            Menu::Gated(configs) => {
                let config = one_of(config, configs(), rowwise::Config::name)?;
                rowwise::generate(&config, program, self.arch)
            }
            Menu::Fixed(configs) => one_of(config, configs(), |(name, _)| name.clone())?.1(self.arch),
        }
    }
}

/// Every kernel.
pub const KERNELS: &[Kernel] = &[
    Kernel {
        name: "fused",
        doc: "C = act(A B1^T, A B2^T): 4-bit weights widened to f16 in registers, f16 A and C",
        arch: Target::Sm90a,
        menu: Menu::Fused(|| sm90a::config::Config::MENU.map(Config::Sm90a).into()),
    },
    Kernel {
        name: "warpwise",
        doc: "the same for up to 16 tokens, each warp with weights of its own by mma.sync",
        arch: Target::Sm90a,
        menu: Menu::Fused(|| warpwise::config::Config::menu().map(Config::Warpwise).collect()),
    },
    Kernel {
        name: "plain",
        doc: "the same on weights as a checkpoint has them, without prepack",
        arch: Target::Sm90a,
        menu: Menu::Fused(|| plain::config::Config::menu().map(Config::Plain).collect()),
    },
    Kernel {
        name: "fp8",
        doc: "the same on e4m3 operands, f16 C",
        arch: Target::Sm90a,
        menu: Menu::Fused(|| fp8::config::Config::MENU.map(Config::Fp8).into()),
    },
    Kernel {
        name: "fused",
        doc: "the same by mma.sync on the pack of sm_90a, f16 A and C",
        arch: Target::Sm80,
        menu: Menu::Fused(|| sm80::config::Config::MENU.map(Config::Sm80).into()),
    },
    SM100,
    Kernel { arch: Target::Sm103a, ..SM100 },
    SM100_MXFP4,
    Kernel { arch: Target::Sm103a, ..SM100_MXFP4 },
    SM100_W4A16,
    Kernel { arch: Target::Sm103a, ..SM100_W4A16 },
    SM120,
    Kernel { arch: Target::Sm121a, ..SM120 },
    SM120_MXFP4,
    Kernel { arch: Target::Sm121a, ..SM120_MXFP4 },
    Kernel {
        name: "expand",
        doc: "nvfp4 to code times scale as f16 or bf16, exactly, or rounded to e4m3",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| ungated(Expand::configs())),
    },
    Kernel {
        name: "quantize",
        doc: "floats to nvfp4, to the floats that it stands for, or to e4m3",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| ungated(Quantize::configs())),
    },
    Kernel {
        name: "amax",
        doc: "the largest magnitude of a float matrix, in parts, of rows in groups too",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| {
            named(amax::configs(), amax::name, |&(ty, grouped), to| amax::generate(ty, grouped, to))
        }),
    },
    Kernel {
        name: "silu_mul",
        doc: "act(gate, up) of two float matrices",
        arch: Target::Sm80,
        menu: Menu::Gated(SiluMul::configs),
    },
    Kernel {
        name: "scale_atoms",
        doc: "block scales to 128x4 atoms, of rows in groups too",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| {
            named(atoms::configs(), atoms::name, |&(layout, grouped), to| {
                atoms::generate(layout, grouped, to)
            })
        }),
    },
    Kernel {
        name: "copy",
        doc: "bytes as they are, from memory of others too",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| named(["bytes"], |name| (*name).into(), |_, to| copy::generate(to))),
    },
    Kernel {
        name: "mixture",
        doc: "rows sorted by expert, and the weighted sum of what experts make of them",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| {
            named(mixture::Step::all(), |step| step.name(), |&step, to| mixture::generate(step, to))
        }),
    },
    Kernel {
        name: "pack",
        doc: "the weight pack of sm_90a from a checkpoint's layout",
        arch: Target::Sm80,
        menu: Menu::Fixed(|| {
            named(ScaleLayout::ALL, ToString::to_string, |&layout, to| pack::generate(layout, to))
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
const SM100: Kernel = Kernel {
    name: "fused",
    doc: "C = act(A B1^T, A B2^T): nvfp4 operands on FP4 tensor cores, f16 C; simulated, not yet run on silicon",
    arch: Target::Sm100a,
    menu: Menu::Fused(|| sm100(&[Formats::NVFP4])),
};
const SM100_MXFP4: Kernel = Kernel {
    name: "fused_mxfp4",
    doc: "the same on mxfp4 operands; simulated, not yet run on silicon",
    menu: Menu::Fused(|| sm100(&[Formats::MXFP4])),
    ..SM100
};
const SM100_W4A16: Kernel = Kernel {
    name: "fused_w4a16",
    doc: "the same on f16 or bf16 A, nvfp4 weights widened to that on their way to the tensor core, C as A; simulated, not \
          yet run on silicon",
    menu: Menu::Fused(|| sm100(&[Formats::Wide(HalfFormat::F16), Formats::Wide(HalfFormat::Bf16)])),
    ..SM100
};
const SM120: Kernel =
    Kernel { arch: Target::Sm120a, menu: Menu::Fused(|| sm120(BlockFormat::Nvfp4)), ..SM100 };
const SM120_MXFP4: Kernel =
    Kernel { arch: Target::Sm120a, menu: Menu::Fused(|| sm120(BlockFormat::Mxfp4)), ..SM100_MXFP4 };

fn sm100(formats: &[Formats]) -> Vec<Config> {
    formats.iter().flat_map(|&formats| sm100a::config::Config::menu(formats)).map(Config::Sm100a).collect()
}

fn sm120(format: BlockFormat) -> Vec<Config> {
    sm120a::config::Config::menu(format).map(Config::Sm120a).into()
}

fn named<C: 'static>(
    configs: impl IntoIterator<Item = C>,
    name: impl Fn(&C) -> String,
    text: fn(&C, Target) -> Result<Module, Error>,
) -> Vec<Named> {
    let one = |config: C| -> Named { (name(&config), Box::new(move |target| text(&config, target))) };
    configs.into_iter().map(one).collect()
}

/// Those that compute no activation; the generator asks for one.
fn ungated(configs: Vec<rowwise::Config>) -> Vec<Named> {
    let text = |config: &_, target| rowwise::generate(config, &Activation::Identity.program(), target);
    named(configs, rowwise::Config::name, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_kernel_generates_every_configuration_under_a_name_of_its_own() {
        let mut seen = HashSet::new();
        for kernel in KERNELS {
            for config in kernel.configs() {
                let module = kernel.generate(&config, &Activation::Silu.program(), true).unwrap();
                let target = format!(".target {}", kernel.arch);
                let text = module.to_string();
                assert!(text.contains(&target), "{} {config}", kernel.name);
                assert!(text.contains("st.global"), "{} {config} leaves no result", kernel.name);
                assert!(seen.insert((kernel.arch, kernel.name, config)));
            }
            let (config, silu) = (kernel.configs().remove(0), Activation::Silu.program());
            let text = |program: &Program, aligned| kernel.generate(&config, program, aligned).unwrap();
            let (one, other) = (text(&silu, true), text(&Activation::SWIGLU_OAI.program(), true));
            assert_eq!(one != other, kernel.has_activation(), "{}", kernel.name);
            assert_eq!(one != text(&silu, false), kernel.has_unaligned(), "{}", kernel.name);
            let message = kernel.generate("none", &Activation::Silu.program(), true).unwrap_err().to_string();
            assert!(message.contains(&kernel.configs()[0]), "{message}");
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
        let page = text("docs/performance.md");
        let mut rows = 0;
        for kernel in KERNELS.iter().filter(|kernel| kernel.has_unaligned()) {
            let config = kernel.configs().remove(0);
            let cards = seen_on(&config);
            assert_eq!(kernel.doc.contains(UNSEEN), cards.is_empty(), "{} {}", kernel.arch, kernel.name);
            let family: Vec<&str> = config.split('_').take(2).collect();
            let family = format!("`{}_*`", family.join("_"));
            let Some(row) = page.lines().find(|line| line.contains(&family)) else { continue };
            rows += 1;
            assert_eq!(row.contains(UNSEEN), cards.is_empty(), "{row}");
            assert!(cards.iter().all(|card| row.contains(card)), "{row}");
        }
        assert_eq!(rows, 13, "kernels with a row in docs/performance.md");
    }
}
