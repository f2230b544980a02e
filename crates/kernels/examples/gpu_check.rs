//! Runs the kernels beside the fused Hopper kernel on a real card at real sizes, checks them against the host, and
//! times them: launches replayed from a graph, operands rotating beyond L2, with and without programmatic dependent
//! launch. `cargo run --release -p dualgemm-kernels --example gpu_check [NAME…]` runs those whose name contains one of
//! the words. Small shapes with all their tails are what `tests/others` and `tests/fused` run, with `DUALGEMM_TEST_DEVICE=cuda`.

use dualgemm_bench::Timing;
use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_cuda::Cuda;
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::scalar::{e2m1, e4m3};
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::fused::{Config, Fused};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::dequantize::Dequantize;
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products, SiluMul};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::variant::Variant;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::{fp8, plain, sm80};
use half::f16;

type Failure = Box<dyn std::error::Error>;

/// Bytes that must rotate for L2 (50 MB on an H100) to be cold.
const ROTATE: usize = 160 << 20;

/// The card, and what to run.
struct Check {
    gpu: Cuda,
    words: Vec<String>,
    failures: Vec<String>,
}

impl Check {
    fn upload(&self, bytes: &[u8]) -> Result<DevicePtr, Failure> {
        let ptr = self.gpu.alloc(bytes.len())?;
        self.gpu.copy_to(ptr, bytes)?;
        Ok(ptr)
    }

    fn read(&self, from: DevicePtr, bytes: usize) -> Result<Vec<u8>, Failure> {
        let mut data = vec![0; bytes];
        self.gpu.copy_from(&mut data, from)?;
        Ok(data)
    }

    /// Codes and scales on the card; what was allocated goes to `ptrs`.
    fn upload_codes(
        &self,
        matrix: &QuantizedMatrix<'_>,
        ptrs: &mut Vec<DevicePtr>,
    ) -> Result<Codes, Failure> {
        let (codes, scales) = (self.upload(matrix.codes())?, self.upload(matrix.scales())?);
        ptrs.extend([codes, scales]);
        Ok(Codes { m: matrix.rows(), k: matrix.k(), codes, pitch: matrix.k() / 2, scales })
    }

    fn wants(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word.as_str()))
    }

    /// One kernel: `sets` makes the launches on as many copies of the operands as rotate, `verify` says how wrong the
    /// first copy's result is (0 is equal) and how wrong it may be.
    fn kernel(
        &mut self,
        name: &str,
        (bytes, flops): (usize, f64),
        mut set: impl FnMut(&Self) -> Result<(Vec<LaunchSpec>, Vec<DevicePtr>), Failure>,
        verify: impl FnOnce(&Self, &[DevicePtr]) -> Result<(f64, f64), Failure>,
    ) -> Result<(), Failure> {
        if !self.wants(name) {
            return Ok(());
        }
        let copies = (ROTATE / bytes.max(1)).clamp(2, 48);
        let sets = (0..copies).map(|_| set(self)).collect::<Result<Vec<_>, _>>()?;
        for spec in &sets[0].0 {
            // SAFETY: `set` made the operands as large as its launches say; they are freed at the end.
            unsafe { self.gpu.launch(spec) }?;
        }
        self.gpu.synchronize()?;
        let (error, bound) = verify(self, &sets[0].1)?;
        let verdict = if error <= bound { "PASS" } else { "FAIL" };
        if error > bound {
            self.failures.push(name.into());
        }
        let mut times = Vec::new();
        for programmatic in [false, true] {
            let specs: Vec<LaunchSpec> = sets
                .iter()
                .flat_map(|(specs, _)| specs)
                .map(|spec| spec.clone().programmatic(programmatic))
                .collect();
            let rounds = (400 / copies).clamp(1, 40);
            let graph = self.gpu.record(|| {
                // SAFETY: as above.
                (0..rounds).flat_map(|_| &specs).try_for_each(|spec| unsafe { self.gpu.launch(spec) })
            })?;
            // SAFETY: as above.
            let replay = || unsafe { graph.replay() };
            replay()?;
            let mut runs = Vec::new();
            for _ in 0..7 {
                let time: Result<f64, dualgemm_device::Error> = self.gpu.time_us(replay);
                runs.push(time? / (rounds * copies) as f64);
            }
            times.push(Timing::from_times(runs).median_us);
        }
        let [cold, dependent] = [times[0], times[1]];
        println!(
            "{verdict} {name:<58} {cold:9.2} us  pdl {dependent:9.2} us  {:7.0} GB/s  {:6.1} TFLOP/s  error {error:.1e}",
            bytes as f64 / dependent * 1e-3,
            flops / dependent * 1e-6,
        );
        for ptr in sets.into_iter().flat_map(|(_, pointers)| pointers) {
            self.gpu.free(ptr)?;
        }
        Ok(())
    }
}

fn quantized(name: &str, (rows, k): (usize, usize), scales: ScaleSet) -> QuantizedMatrix<'static> {
    let sets = (CodeSet::Full, scales);
    let scale = GlobalScale::multiplier(0.01);
    Inputs::seeded(5).quantized(name, BlockFormat::Nvfp4, (rows, k), sets, scale).expect("a valid shape")
}

fn image(matrix: &QuantizedMatrix<'_>) -> impl Iterator<Item = f32> {
    let place = (0..matrix.rows()).flat_map(|r| (0..matrix.k()).map(move |c| (r, c)));
    place.map(|(r, c)| e2m1::decode(matrix.code(r, c)) * e4m3::decode(matrix.scale_byte(r, c / 16)))
}

fn f16_bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()
}

/// Bytes that differ, as a number.
fn different(got: &[u8], want: &[u8]) -> f64 {
    got.iter().zip(want).filter(|(got, want)| got != want).count() as f64
        + got.len().abs_diff(want.len()) as f64
}

fn elementwise(check: &mut Check) -> Result<(), Failure> {
    for (m, k) in [(1, 7168), (16, 7168), (64, 7168), (256, 7168), (512, 7168), (2048, 4096)] {
        for layout in [ScaleLayout::Linear, ScaleLayout::Sf128x4] {
            let a = quantized("a", (m, k), ScaleSet::Full).with_scale_layout(layout);
            let kernel = Expand::new(&check.gpu, layout, FloatType::F16)?;
            check.kernel(
                &format!("expand {layout} to f16, {m}x{k}"),
                (m * k * 41 / 16, 0.0),
                |check| {
                    let mut ptrs = vec![check.gpu.alloc(m * k * 2)?];
                    let spec = kernel.spec(&check.upload_codes(&a, &mut ptrs)?, ptrs[0], 2 * k)?;
                    Ok((vec![spec], ptrs))
                },
                |check, ptrs| Ok((different(&check.read(ptrs[0], m * k * 2)?, &f16_bytes(image(&a))), 0.0)),
            )?;
        }
    }
    for (m, k) in [(1, 7168), (64, 7168), (256, 7168), (2048, 4096)] {
        let a = Inputs::seeded(3).floats("a", FloatType::F16, m, k)?;
        let rows = a.to_le_bytes();
        let scale = GlobalScale::multiplier(0.002);
        let fixed = Quantizer::new(Producer::Te, scale, FloatType::F16, Search::Plain).matrix("a", &a)?;
        let dynamic = dualgemm_formats::quantize("a", &a, Producer::Te, Search::Plain)?;
        let amax = Amax::new(&check.gpu, FloatType::F16)?;
        for (sink, name) in
            [(Sink::Codes(ScaleLayout::Linear), "nvfp4"), (Sink::Image(FloatType::F16), "f16 image")]
        {
            for is_dynamic in [false, true] {
                let kernel = Quantize::new(&check.gpu, FloatType::F16, sink, is_dynamic)?;
                let how = if is_dynamic { "dynamic (two launches)" } else { "static" };
                let want = if is_dynamic { &dynamic } else { &fixed };
                let codes = matches!(sink, Sink::Codes(_));
                let bytes =
                    m * k * 2 * if is_dynamic { 2 } else { 1 } + m * k * if codes { 9 } else { 32 } / 16;
                check.kernel(
                    &format!("quantize f16 to {name}, {how}, {m}x{k}"),
                    (bytes, 0.0),
                    |check| {
                        let values = check.upload(&rows)?;
                        let (out, scales) = (check.gpu.alloc(m * k * 2)?, check.gpu.alloc(m * k / 16)?);
                        let (parts, scale_out) =
                            (check.gpu.alloc(4 * MAX_PARTS as usize)?, check.gpu.alloc(4)?);
                        let a = Floats { m, k, values, pitch: 2 * k };
                        let to = match codes {
                            true => Out::Codes { codes: out, scales },
                            false => Out::Image { values: out, pitch: 2 * k },
                        };
                        let with = match is_dynamic {
                            true => Scale::Dynamic { parts, scale: scale_out },
                            false => Scale::Static(scale),
                        };
                        let mut specs = Vec::new();
                        if is_dynamic {
                            specs.push(amax.spec(&a, parts, None)?);
                        }
                        specs.push(kernel.spec(&a, &to, &with)?);
                        Ok((specs, vec![out, scales, values, parts, scale_out]))
                    },
                    |check, ptrs| {
                        let error = match codes {
                            true => {
                                different(&check.read(ptrs[0], m * k / 2)?, want.codes())
                                    + different(&check.read(ptrs[1], m * k / 16)?, want.scales())
                            }
                            false => different(&check.read(ptrs[0], m * k * 2)?, &f16_bytes(image(want))),
                        };
                        Ok((error, 0.0))
                    },
                )?;
            }
        }
    }
    Ok(())
}

fn activation_and_weights(check: &mut Check) -> Result<(), Failure> {
    let program = Activation::Silu.program();
    for (m, n) in [(1, 4096), (256, 4096), (512, 3072), (2048, 14336)] {
        let both = Inputs::seeded(4).floats("gate and up", FloatType::F16, m, 2 * n)?;
        let rows = both.to_le_bytes();
        let kernel = SiluMul::new(
            &check.gpu,
            (FloatType::F16, false, false),
            Sink::Float(FloatType::F16),
            &program,
            true,
        )?;
        check.kernel(
            &format!("silu_mul f16 to f16, {m}x{n}"),
            (m * n * 6, 0.0),
            |check| {
                let gate = check.upload(&rows)?;
                let out = check.gpu.alloc(m * n * 2)?;
                let products = Products {
                    m,
                    n,
                    gate,
                    up: gate.offset(2 * n as u64),
                    pitch: 4 * n,
                    alpha: [1.0; 2],
                    a_scale: DevicePtr::NULL,
                    bias: [DevicePtr::NULL; 2],
                };
                let to = Out::Image { values: out, pitch: 2 * n };
                Ok((vec![kernel.spec(&products, &to, GlobalScale::ONE)?], vec![out, gate]))
            },
            |check, ptrs| {
                let got = FloatType::F16.values(&check.read(ptrs[0], m * n * 2)?);
                let place = (0..m).flat_map(|r| (0..n).map(move |c| (r, c)));
                let want: Vec<f64> = place
                    .map(|(r, c)| program.eval_f64(both.value(r, c).into(), both.value(r, n + c).into()))
                    .collect();
                Ok((Comparison::new(&got, &want, n)?.rel_l2, 3e-4))
            },
        )?;
    }
    let (n, k) = (4096, 7168);
    let weights =
        GateUp::new(quantized("gate", (n, k), ScaleSet::Full), quantized("up", (n, k), ScaleSet::Full));
    let gate = &weights.gate;
    let kernel = Dequantize::new(&check.gpu, ScaleLayout::Linear, FloatType::F16)?;
    check.kernel(
        &format!("dequantize linear to f16, {n}x{k}"),
        (n * k * 41 / 16, 0.0),
        |check| {
            let mut ptrs = vec![check.gpu.alloc(n * k * 2)?];
            let spec = kernel.spec(&check.upload_codes(gate, &mut ptrs)?, 0.01, ptrs[0], 2 * k)?;
            Ok((vec![spec], ptrs))
        },
        |check, ptrs| {
            let want = f16_bytes(image(gate).map(|x| x * 0.01));
            Ok((different(&check.read(ptrs[0], n * k * 2)?, &want), 0.0))
        },
    )?;
    let kernel = GpuPack::new(&check.gpu, ScaleLayout::Linear)?;
    let want = Pack::new(&weights)?;
    check.kernel(
        &format!("pack for sm_90a, gate and up of {n}x{k}"),
        (2 * want.bytes().len(), 0.0),
        |check| {
            let mut ptrs = vec![check.gpu.alloc(want.bytes().len())?];
            let [gate, up] = [&weights.gate, &weights.up].map(|half| check.upload_codes(half, &mut ptrs));
            Ok((vec![kernel.spec(&gate?, &up?, ptrs[0])?], ptrs))
        },
        |check, ptrs| Ok((different(&check.read(ptrs[0], want.bytes().len())?, want.bytes()), 0.0)),
    )
}

/// The kernels beside those for Hopper's pack, on configurations for about so many tokens.
fn gemms(check: &mut Check) -> Result<(), Failure> {
    let sizes = [(1, 4096, 7168), (16, 4096, 7168), (64, 4096, 7168), (256, 4096, 7168), (512, 3072, 7168)];
    for (m, n, k) in sizes {
        let near = |tokens: u32| (m.min(64)..=2 * m.max(8)).contains(&(tokens as usize));
        let sm80 = sm80::config::Config::MENU.into_iter().filter(|config| near(config.tokens));
        let plain = plain::config::Config::MENU.into_iter().filter(|config| near(config.tokens));
        let fp8 = fp8::config::Config::MENU.into_iter().filter(|config| near(config.tokens));
        let configs = sm80.map(Config::Sm80).chain(plain.map(Config::Plain)).chain(fp8.map(Config::Fp8));
        for config in configs {
            let of_e4m3 = matches!(config, Config::Fp8(_));
            let half = |name| quantized(name, (n, k), ScaleSet::Unit);
            let half = |name| if of_e4m3 { exact_in_e4m3(&half(name)) } else { Ok(half(name)) };
            let weights = GateUp::new(half("gate")?, half("up")?);
            let a = Inputs::seeded(8).floats("a", FloatType::F16, m, k)?;
            let values = a.to_le_bytes();
            let a = AOperand::Float(if of_e4m3 { rounded_to_e4m3(&a)? } else { a });
            let want =
                [0, m - 1].map(|row| (row, reference(&Epilogue::default(), &a, row..row + 1, &weights)));
            let (name, c) = (config.name(), m * n * 2);
            let (bytes, bound) = match config {
                // Hopper keeps about 14 bits of the sums.
                Config::Fp8(_) => (2 * n * k + m * (k + 2 * n), 2e-2),
                _ => (n * k * 9 / 8 + 2 * m * (k + n), 3e-4),
            };
            // Where A's order is another, with the launch that brings it there too.
            let ordered: &[bool] = if matches!(config, Config::Plain(_)) { &[false, true] } else { &[false] };
            for &with_order in ordered {
                let what = if with_order { " with A's order" } else { "" };
                check.kernel(
                    &format!("{name}{what} {m}x{n}x{k}"),
                    (bytes, 4.0 * (m * n * k) as f64),
                    |check| {
                        let variant = Variant::new(Activation::Silu.program()).for_weights(n, k);
                        let kernel = Fused::new(&check.gpu, config, &variant)?;
                        let there = Operands::upload(&kernel, &a, std::slice::from_ref(&weights), &[])?;
                        let (at, order) = (there.args.a.codes, with_order.then(|| order(check, &values)));
                        let (mut specs, mut ptrs) = (Vec::new(), vec![there.args.output.c]);
                        if let Some((kernel, values)) = order.transpose()? {
                            let (to, from) = (
                                Out::Image { values: at, pitch: there.args.a.pitch },
                                Floats { m, k, values, pitch: 2 * k },
                            );
                            specs.push(kernel.spec(&from, &to, &Scale::Static(GlobalScale::ONE))?);
                            ptrs.push(values);
                        }
                        specs.push(kernel.spec(&there.args)?);
                        ptrs.extend(
                            there
                                .into_allocations()
                                .into_iter()
                                .filter(|ptr| *ptr != ptrs[0])
                                .collect::<Vec<_>>(),
                        );
                        Ok((specs, ptrs))
                    },
                    |check, ptrs| {
                        let got = FloatType::F16.values(&check.read(ptrs[0], c)?);
                        let error = |(row, want): &(usize, Vec<f64>)| {
                            Ok::<_, Failure>(Comparison::new(&got[row * n..][..n], want, n)?.rel_l2)
                        };
                        Ok((error(&want[0])?.max(error(&want[1])?), bound))
                    },
                )?;
            }
        }
    }
    Ok(())
}

/// The matrix with codes that are powers of two: times a block scale e4m3 holds them.
fn exact_in_e4m3(matrix: &QuantizedMatrix<'_>) -> Result<QuantizedMatrix<'static>, Failure> {
    let (n, k, scale) = (matrix.rows(), matrix.k(), matrix.global_scale());
    let (mut codes, scales) = matrix.dense_rows(0..n);
    codes.iter_mut().for_each(|pair| *pair &= 0xEE);
    Ok(QuantizedMatrix::new("e4m3", BlockFormat::Nvfp4, n, k, codes, scales, ScaleLayout::Linear, scale)?)
}

fn rounded_to_e4m3(a: &FloatMatrix<'_>) -> Result<FloatMatrix<'static>, Failure> {
    let (m, k) = (a.rows(), a.cols());
    let place = (0..m).flat_map(|r| (0..k).map(move |c| (r, c)));
    let values: Vec<f32> = place.map(|(r, c)| e4m3::decode(e4m3::encode(a.value(r, c)))).collect();
    Ok(FloatMatrix::F32(Matrix::new("a", m, k, values)?))
}

/// What brings A into the order of the kernel without prepack, and A as it is.
fn order(check: &Check, rows: &[u8]) -> Result<(Quantize, DevicePtr), Failure> {
    let kernel = Quantize::new(&check.gpu, FloatType::F16, Sink::Permuted(FloatType::F16), false)?;
    Ok((kernel, check.upload(rows)?))
}

fn main() -> Result<(), Failure> {
    let gpu = Cuda::open(0)?;
    println!("{} ({}), driver {}", gpu.info().name, gpu.info().arch, Cuda::driver_version()?);
    let mut check = Check { gpu, words: std::env::args().skip(1).collect(), failures: Vec::new() };
    for section in [elementwise, activation_and_weights, gemms] {
        // A kernel that the driver refuses must not hide the others.
        if let Err(error) = section(&mut check) {
            println!("FAIL {error}");
            check.failures.push(error.to_string());
        }
    }
    match check.failures.len() {
        0 => println!("all PASS"),
        n => println!("{n} FAIL: {}", check.failures.join("; ")),
    }
    Ok(())
}
