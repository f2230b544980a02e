//! What the builder writes: snapshots, determinism, legality, misuse.

#[path = "../examples/copy_scale.rs"]
mod copy_scale;
mod methods;

use dualgemm_ptx::ast::Version;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;
use dualgemm_ptx::legal::{Illegal, Problem};
use dualgemm_ptx::{Error, Target, parse};
use std::path::PathBuf;

/// Compares with `tests/snapshots/<name>.ptx`; `UPDATE_SNAPSHOTS=1` rewrites it.
fn snapshot(name: &str, text: &str) {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "tests/snapshots", &format!("{name}.ptx")].iter().collect();
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = text.lines().zip(stored.lines()).position(|(a, b)| a != b);
    assert!(
        stored == text,
        "{} differs from line {:?} on; if that is meant, run with UPDATE_SNAPSHOTS=1",
        path.display(),
        differs.map(|line| line + 1)
    );
}

#[test]
fn example_text_is_as_stored() {
    copy_scale::main().unwrap();
    let module = copy_scale::copy_scale(Target::Sm90a).unwrap();
    assert_eq!(
        module.entry("copy_scale").unwrap().directive("reqntid"),
        Some(&[copy_scale::TILE.into(), 1, 1][..])
    );
    snapshot("copy_scale.sm_90a", &module.to_string());
}

#[test]
fn texts_of_all_methods_are_as_stored() {
    for kernel in methods::MODULES {
        let module = methods::module(&kernel).unwrap_or_else(|e| panic!("{}: {e}", kernel.0));
        snapshot(&format!("{}.{}", kernel.0, kernel.1), &module.to_string());
    }
}

/// A cache of assembled kernels is keyed by their text.
#[test]
fn building_twice_gives_the_same_text_exact() {
    for kernel in methods::MODULES {
        let [first, second] = [(), ()].map(|()| methods::module(&kernel).unwrap().to_string());
        assert_eq!(first, second);
    }
}

#[test]
fn built_module_equals_its_text_read_back() {
    for kernel in methods::MODULES {
        let module = methods::module(&kernel).unwrap();
        let read = parse::module(&module.to_string()).unwrap();
        // Line by line, since the trees are too large to print.
        for (read, built) in read.functions().zip(module.functions()) {
            for (read, built) in read.instructions().zip(built.instructions()) {
                assert_eq!(read, built, "{}", kernel.0);
            }
        }
        assert!(read == module, "{}", kernel.0);
    }
}

#[test]
fn missing_instruction_is_an_error_that_names_it_and_the_target() {
    let mut builder = Builder::new(Target::Sm100a, Version::new(8, 8));
    let mut smem = SmemLayout::new();
    let tile = smem.alloc("tile", 1024, 1024);
    builder.kernel("k", |k| {
        let base = k.shared(&smem);
        methods::multiply(k, base.at(tile.offset));
    });
    let Err(Error::Illegal(illegal)) = builder.finish() else { panic!("wgmma on sm_100a") };
    assert_eq!(illegal.len(), 7, "{illegal:#?}");
    for error in &illegal {
        assert!(matches!(error, Illegal::Instruction { problem: Problem::Target { .. }, .. }), "{error}");
        assert!(error.to_string().contains("wgmma"), "{error}");
        assert!(error.to_string().contains("does not exist on sm_100a"), "{error}");
    }
}

fn mistake(build: impl FnOnce(&mut Kernel)) -> String {
    let mut builder = Builder::new(Target::Sm90a, Version::new(8, 0));
    builder.kernel("k", build);
    builder.finish().unwrap_err().to_string()
}

#[test]
fn misuse_of_a_destination_is_an_error() {
    let message = mistake(|k| {
        let x = k.mov::<F32>(1.0f32);
        k.to(x).mov::<U32>(1u32);
    });
    assert_eq!(message, "kernel k: %f0 is declared .f32, the instruction gives .u32");
    let message = mistake(|k| {
        let x = k.mov::<U32>(1u32);
        k.to(x).cta_sync();
    });
    assert_eq!(
        message,
        "kernel k: %r0 (.b32) cannot be written by barrier.sync.aligned, which gives no single result"
    );
}

#[test]
fn counts_the_hardware_lacks_are_errors() {
    let message = mistake(|k| {
        let acc = k.zeros(6);
        let b = k.mov::<B64>(0u64);
        k.wgmma(WgmmaFormat::E4m3, &acc, WgmmaA::Desc(b), b, false);
    });
    assert!(message.contains("m64n12k32"), "{message}");
    let message = mistake(|k| k.setmaxnreg_inc(260));
    assert!(message.contains("operand 1 must be `n`: a number from 24 to 256"), "{message}");
    let message = mistake(|k| k.wgmma_wait(8));
    assert!(message.contains("operand 1 must be `n`: a number from 0 to 7"), "{message}");
}

#[test]
fn control_flow_is_structured_in_the_text() {
    let mut builder = Builder::new(Target::Sm80, Version::new(7, 0));
    builder.kernel("flow", |k| {
        let n = k.param::<U32>("n");
        let n = k.ld_param(&n);
        let sum = k.mov::<U32>(0u32);
        k.for_range("rows", 0u32, n, 2, |k, i, this| {
            let large = k.compare(Cmp::Gt, i, 9u32);
            k.break_if(this, large);
            k.if_else(
                large,
                "parity",
                |k| k.assign(sum, 1u32),
                |k| {
                    k.to(sum).add(sum, i);
                },
            );
        });
        k.do_while("rows", |k| {
            k.to(sum).shr(sum, 1u32);
            k.compare(Cmp::Ne, sum, 0u32)
        });
        k.comment("Two lines\nof comment.");
        let odd = k.compare(Cmp::Eq, sum, 1u32);
        k.unless(odd).trap();
    });
    snapshot("flow.sm_80", &builder.finish().unwrap().to_string());
}
