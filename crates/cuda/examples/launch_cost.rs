//! What a launch costs the host, by what it asks for: arguments, an early start (programmatic dependent launch), two
//! kernels by two calls or by one replay of a graph. `cargo run --release -p dualgemm-cuda --example launch_cost`.
//!
//! The kernels do nothing, so that the queue never fills; the median of 50 rounds of 100 counts.

use std::sync::Arc;
use std::time::Instant;

use dualgemm_cuda::{Cuda, ReadyLaunch};
use dualgemm_device::{Args, Device, DevicePtr, Error, LaunchSpec, Stream};

/// A kernel with a parameter of so many bytes and so many words.
fn kernel(card: &Cuda, block: usize, words: usize) -> Result<LaunchSpec, Error> {
    let mut params = vec![format!(".param .align 64 .b8 block[{block}]")];
    params.extend((0..words).map(|i| format!(".param .u64 word{i}")));
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k({})\n{{\n\t\
         griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n\tret;\n}}\n",
        params.join(", ")
    );
    let function = card.function(card.load(&text)?, "k")?;
    let args = Args::new().bytes(&vec![0; block], 64);
    let args = (0..words).fold(args, |args, _| args.ptr(DevicePtr::NULL));
    Ok(LaunchSpec::new(function, [1, 1, 1], [128, 1, 1]).args(args))
}

fn report(card: &Cuda, name: &str, call: impl Fn() -> Result<(), Error>) -> Result<(), Error> {
    let mut times = Vec::new();
    for _ in 0..50 {
        card.synchronize()?;
        let start = Instant::now();
        for _ in 0..100 {
            call()?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e4);
    }
    card.synchronize()?;
    times.sort_by(f64::total_cmp);
    println!("{name:60} {:6.2} µs", times[times.len() / 2]);
    Ok(())
}

fn main() -> Result<(), Error> {
    let card = Arc::new(Cuda::open(0)?);
    println!("{}, driver {}", card.info().name, Cuda::driver_version()?);
    let owned = card.new_stream()?;
    // SAFETY: `owned` is there to the end.
    let stream = unsafe { owned.id() };
    // SAFETY: the kernels, here and below, use none of their arguments.
    let start = |stream, launches: &[ReadyLaunch]| unsafe { card.start(stream, launches) };
    let (few, many) = (kernel(&card, 8, 1)?, kernel(&card, 128, 12)?);
    let ready = |spec: &LaunchSpec, early: bool| card.ready(spec.clone().programmatic(early));
    for early in [false, true] {
        let early_name = if early { ", early start" } else { "" };
        for (name, spec) in [("2 arguments", &few), ("13 arguments, one of 128 bytes", &many)] {
            let spec = spec.clone().programmatic(early);
            report(&card, &format!("looked up, {name}{early_name}"), || {
                // SAFETY: see above.
                unsafe { card.launch_on(stream, &spec) }
            })?;
            let one: [ReadyLaunch; 1] = [ready(&spec, early)?];
            report(&card, &format!("ready, {name}{early_name}"), || start(stream, &one))?;
        }
        let both = [ready(&few, early)?, ready(&many, early)?];
        report(&card, &format!("two launches, ready{early_name}"), || start(stream, &both))?;
        let first_plain = [ready(&few, false)?, ready(&many, early)?];
        report(&card, &format!("two launches, ready, the second{early_name}"), || {
            start(stream, &first_plain)
        })?;
        let graph = card.record(|| start(Stream::Own, &both))?;
        report(&card, &format!("two launches, a graph of both{early_name}"), || {
            // SAFETY: see above.
            unsafe { graph.replay_on(stream) }
        })?;
    }
    Ok(())
}
