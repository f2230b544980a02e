//! A and C of one problem in device memory, with copies from and to the host.

use std::ops::Range;

use bytemuck::cast_slice_mut;
use dualgemm_device::Device;
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout, match_floats};
use dualgemm_gemm::{AFormat, AOperand, Comparison, DualGemmDesc, OutFormat, OutScale, OutputMut};

use crate::{Buffer, DeviceA, DeviceC, DeviceCall, Error, Gpu};

/// Room for A and C of up to M rows.
#[derive(Debug)]
pub struct Operands {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    a_layout: ScaleLayout,
    a: Buffer,
    /// Block scales of a quantized A.
    a_scales: Buffer,
    c: Buffer,
    /// Block scales of a quantized C, and its tensor scale.
    c_scales: [Buffer; 2],
}

/// Bytes of so many elements.
fn bytes_of(elements: usize, bits: f64) -> usize {
    (elements as f64 * bits / 8.0) as usize
}

impl Operands {
    /// Takes memory for a problem, block scales of a quantized A in the order that the plan reads.
    pub fn new(gpu: &'static Gpu, desc: &DualGemmDesc, a_layout: ScaleLayout) -> Result<Self, Error> {
        let &DualGemmDesc { m, n, k, a, out, .. } = desc;
        let (a, a_scales) = match a.block_format() {
            Some(format) => (m * k / 2, a_layout.len(m, k / format.block_len())),
            None => (bytes_of(m * k, a.bits_per_element()), 0),
        };
        let (c, c_scales) = match out {
            OutFormat::Nvfp4 { scale_layout, .. } => (m * n / 2, scale_layout.len(m, n / 16)),
            float => (bytes_of(m * n, float.bits_per_element()), 0),
        };
        Ok(Self {
            gpu,
            desc: *desc,
            a_layout,
            a: Buffer::new(gpu, a)?,
            a_scales: Buffer::new(gpu, a_scales)?,
            c: Buffer::zeroed(gpu, c)?,
            c_scales: [Buffer::zeroed(gpu, c_scales)?, Buffer::zeroed(gpu, 4)?],
        })
    }

    /// Copies A to the device; of a quantized one block scales in the plan's order, whichever theirs is. Of C's block scales
    /// nothing is left that a call before has written: one of fewer rows does not overwrite them, and padding is zero.
    ///
    /// # Errors
    /// If it is not what the problem says.
    pub fn write_a(&self, a: &AOperand<'_>) -> Result<(), Error> {
        self.write_rows(a, std::slice::from_ref(&(0..a.rows())))
    }

    /// As [`write_a`](Self::write_a) for the rows of groups, in order. The others become zeros, whatever they are: they are
    /// not checked, and no scale of all of A counts them.
    pub fn write_rows(&self, a: &AOperand<'_>, groups: &[Range<usize>]) -> Result<(), Error> {
        let (found, desc) = (AFormat::of(a), &self.desc);
        if found != desc.a || a.k() != desc.k || a.rows() > desc.m {
            return Err(Error::Operand {
                tensor: "A",
                found: format!("{found} [{}, {}]", a.rows(), a.k()),
                expected: format!("{} [{}, {}]", desc.a, desc.m, desc.k),
            });
        }
        let (mut values, mut scales) = match a {
            AOperand::Float(a) => (a.to_le_bytes(), Vec::new()),
            AOperand::Quantized(a) => {
                groups.iter().try_for_each(|rows| a.check_scales_of(rows.clone()))?;
                a.dense_rows(0..a.rows())
            }
        };
        let ends = groups.iter().map(|rows| rows.end);
        let starts = groups.iter().map(|rows| rows.start);
        for (first, last) in std::iter::once(0).chain(ends).zip(starts.chain([a.rows()])) {
            for bytes in [&mut values, &mut scales] {
                let row = bytes.len() / a.rows();
                bytes[first * row..last * row].fill(0);
            }
        }
        self.a.write(&values)?;
        if let AOperand::Quantized(a) = a {
            let scales = ScaleLayout::Linear.convert(&scales, self.a_layout, a.rows(), a.blocks());
            self.a_scales.write(&scales)?;
        }
        let c_scales = &self.c_scales[0];
        if c_scales.bytes() > 0 {
            self.gpu.memset(c_scales.ptr(), 0, c_scales.bytes())?;
        }
        Ok(())
    }

    /// The tensor scale of a quantized A, 1 of another.
    pub fn a_scale(a: &AOperand<'_>) -> f32 {
        match a {
            AOperand::Float(_) => 1.0,
            AOperand::Quantized(a) => a.global_scale().value(),
        }
    }

    /// A call on rows `first .. first + m`, of an A with that tensor scale. With a `first` other than 0, scales are
    /// [linear](ScaleLayout::Linear).
    pub fn call_on(&self, first: usize, m: usize, a_scale: f32) -> DeviceCall {
        let &DualGemmDesc { n, k, a, out, .. } = &self.desc;
        let a = match a.block_format() {
            None => {
                let pitch = bytes_of(k, a.bits_per_element());
                DeviceA::Float { values: self.a.ptr().offset((first * pitch) as u64), pitch }
            }
            Some(format) => {
                let codes = self.a.ptr().offset((first * k / 2) as u64);
                let scales = self.a_scales.ptr().offset((first * k / format.block_len()) as u64);
                DeviceA::Blocks { format, codes, scales, global_scale: a_scale }
            }
        };
        let [scales, global_scale] = &self.c_scales;
        let c = match out {
            OutFormat::Nvfp4 { .. } => DeviceC::Nvfp4 {
                codes: self.c.ptr().offset((first * n / 2) as u64),
                scales: scales.ptr().offset((first * n / 16) as u64),
                global_scale: global_scale.ptr(),
            },
            float => {
                DeviceC::Float(self.c.ptr().offset((first * bytes_of(n, float.bits_per_element())) as u64))
            }
        };
        DeviceCall { m, a, c }
    }

    /// A call on the first m rows, of an A with that tensor scale.
    pub fn call(&self, m: usize, a_scale: f32) -> DeviceCall {
        self.call_on(0, m, a_scale)
    }

    /// The bytes of C (codes, if it is quantized), the bytes of its scales and its tensor scale, after every launch on
    /// the device's own stream.
    pub fn read(&self) -> Result<(Vec<u8>, Vec<u8>, f32), Error> {
        let mut c = vec![0; self.c.bytes()];
        self.c.read(&mut c)?;
        let mut scales = vec![0; self.c_scales[0].bytes()];
        self.c_scales[0].read(&mut scales)?;
        Ok((c, scales, self.c_scale()?))
    }

    /// The tensor scale of C.
    fn c_scale(&self) -> Result<f32, Error> {
        if let OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. } = self.desc.out {
            return Ok(scale);
        }
        let mut scale = [0; 4];
        self.c_scales[1].read(&mut scale)?;
        Ok(f32::from_le_bytes(scale))
    }

    /// Copies rows `first .. first + m` of C to the same rows of the host's C. Returns the tensor scale of a quantized
    /// one, whose scales are copied whole if all rows are asked for.
    ///
    /// # Errors
    /// If C is not what the problem says; the failure of an earlier launch.
    pub fn read_c(&self, first: usize, m: usize, c: &mut OutputMut<'_>) -> Result<Option<f32>, Error> {
        let n = self.desc.n;
        let (from, to) = (first * n, (first + m) * n);
        let wrong = |found: String| {
            Err(Error::Operand {
                tensor: "C",
                found,
                expected: format!("{} of at least {to} values", self.desc.out),
            })
        };
        match (c, self.desc.out) {
            (OutputMut::Nvfp4 { codes, scales }, OutFormat::Nvfp4 { scale_layout, .. }) => {
                let len = scale_layout.len(m, n / 16);
                if codes.len() < to / 2 || first > 0 || scales.len() < len {
                    return wrong(format!("{} bytes of codes, {} of scales", codes.len(), scales.len()));
                }
                self.c.read(&mut codes[..m * n / 2])?;
                self.c_scales[0].read(&mut scales[..len])?;
                self.c_scale().map(Some)
            }
            (c, out) => {
                let Some((found, len)) = c.floats() else { return wrong("nvfp4".into()) };
                if out != found.into() || len < to {
                    return wrong(format!("{found} of {len} values"));
                }
                let at = self.c.ptr().offset((from * found.bytes()) as u64);
                match_floats!(c, OutputMut(c) => self.gpu.copy_from(cast_slice_mut(&mut c[from..to]), at)?, _ => {});
                Ok(None)
            }
        }
    }

    /// The relative L2 error of some of the M rows of C.
    pub fn rel_l2(&self, rows: &[usize], want: &[f64]) -> Result<f64, Error> {
        let (c, scales, scale) = self.read()?;
        let (m, n) = (self.desc.m, self.desc.n);
        let got: Vec<f32> = if let OutFormat::Nvfp4 { scale_layout, .. } = self.desc.out {
            let scale = GlobalScale::multiplier(scale);
            let c = QuantizedMatrix::new("C", BlockFormat::Nvfp4, m, n, c, scales, scale_layout, scale)?;
            let row = |&row: &usize| (0..n).map(|col| c.value(row, col) as f32).collect::<Vec<_>>();
            rows.iter().flat_map(row).collect()
        } else {
            let ty = AFormat::from(self.desc.out).float_type().unwrap_or(FloatType::F32);
            let row = |&row: &usize| ty.values(&c[row * n * ty.bytes()..][..n * ty.bytes()]);
            rows.iter().flat_map(row).collect()
        };
        Ok(Comparison::new(&got, want, n)?.rel_l2)
    }
}
