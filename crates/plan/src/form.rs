//! The orders in which strategies read weights, and what their memory looks like: the one place that knows how large the
//! parts of each order are, for one pair of matrices and for those of experts behind each other.

use std::sync::Arc;

use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::Operation;
use dualgemm_kernels::generic::expand::Codes;
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::parts::operand::{ATOM_ROWS, Format, Operand};
use dualgemm_kernels::sm90a::pack::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS};

use crate::{Buffer, Error, Gpu};

dualgemm_formats::named! {
    /// In which order a strategy reads weights.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WeightForm {
        /// The fragment order of the fused kernels, 4.5 bits per weight.
        Packed = "packed",
        /// The same order, each matrix packed by itself.
        PackedApart = "packed apart",
        /// The same order, the only matrix of a linear layer.
        PackedLinear = "packed for a linear layer",
        /// As producers write them: rows of codes, linear scales.
        Plain = "plain",
        /// Rows of codes, scales in 128x4 atoms: what Blackwell's tensor cores read.
        Atoms = "rows of codes with 128x4 scales",
        /// The same of the only matrix of a linear layer.
        AtomsLinear = "rows of codes with 128x4 scales for a linear layer",
        /// Rounded to e4m3, 8 bits per weight, under one scale for each matrix that makes the largest value which its block
        /// scales allow 448: six times the largest of them.
        E4m3 = "e4m3",
    }
}

impl WeightForm {
    /// This order for an operation.
    pub(crate) fn of(self, op: Operation) -> Self {
        match (op, self) {
            (Operation::Linear, Self::Packed) => Self::PackedLinear,
            (Operation::Linear, Self::Atoms) => Self::AtomsLinear,
            _ => self,
        }
    }

    /// Whether it is one of a single matrix.
    pub(crate) fn is_linear(self) -> bool {
        matches!(self, Self::PackedLinear | Self::AtomsLinear)
    }

    /// The fragment order of the fused kernels of an operation.
    pub fn packed(op: Operation) -> Self {
        Self::Packed.of(op)
    }
}

/// Bytes of the pack of a matrix by itself.
pub(crate) fn apart_bytes(n: usize, k: usize) -> usize {
    n.div_ceil(CHUNK_ROWS) * k.div_ceil(CHUNK_K) * CHUNK_BYTES
}

/// A pair of weight matrices, or a linear layer's, in an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Rows of each matrix.
    pub n: usize,
    /// Elements per row.
    pub k: usize,
    /// What they are quantized to.
    pub format: BlockFormat,
    /// The order.
    pub form: WeightForm,
}

impl Layout {
    /// # Errors
    /// If the order is not one for the format.
    pub(crate) fn new((n, k): (usize, usize), format: BlockFormat, form: WeightForm) -> Result<Self, Error> {
        let nvfp4_only = matches!(form, WeightForm::Plain | WeightForm::E4m3);
        if nvfp4_only && format != BlockFormat::Nvfp4 {
            let expected = format!("nvfp4, which strategies that read weights {form} take");
            return Err(Error::Operand { tensor: "weights", found: format.to_string(), expected });
        }
        Ok(Self { n, k, format, form })
    }

    pub(crate) fn blocks(&self) -> usize {
        self.k / self.format.block_len()
    }

    /// Bytes of each part: the pack; or codes of gate, of up, scales of gate, of up; or e4m3 of gate, of up. Parts of
    /// experts lie behind each other, each on a multiple of 16 bytes.
    fn parts(&self) -> Vec<usize> {
        let (&Self { n, k, .. }, blocks) = (self, self.blocks());
        let rows = |scales: usize| vec![n * k / 2, n * k / 2, scales, scales];
        let parts = match self.form {
            WeightForm::Packed => vec![GpuPack::bytes(n, k)],
            WeightForm::PackedApart => vec![apart_bytes(n, k); 2],
            WeightForm::PackedLinear => vec![apart_bytes(n, k)],
            WeightForm::Plain => rows(n * blocks),
            WeightForm::Atoms => rows(ScaleLayout::Sf128x4.len(n, blocks)),
            WeightForm::AtomsLinear => vec![n * k / 2, ScaleLayout::Sf128x4.len(n, blocks)],
            WeightForm::E4m3 => vec![n * k; 2],
        };
        parts.into_iter().map(|bytes| bytes.next_multiple_of(16)).collect()
    }
}

/// Memory of one or more pairs of weight matrices.
#[derive(Debug)]
pub(crate) struct Parts {
    gpu: &'static Gpu,
    layout: Layout,
    count: usize,
    /// Of each part those of all pairs, behind each other.
    buffers: Vec<Arc<Buffer>>,
}

impl Parts {
    /// Takes memory for `count` pairs.
    pub(crate) fn new(gpu: &'static Gpu, layout: Layout, count: usize) -> Result<Self, Error> {
        let take = |bytes: usize| Ok::<_, Error>(Arc::new(Buffer::new(gpu, bytes * count)?));
        let buffers = layout.parts().into_iter().map(take).collect::<Result<_, _>>()?;
        Ok(Self { gpu, layout, count, buffers })
    }

    /// The GPU whose memory this is.
    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes()).sum()
    }

    /// Where the parts of one pair are.
    pub(crate) fn place(&self, index: usize) -> Vec<DevicePtr> {
        let strides = self.layout.parts();
        let at = |(buffer, stride): (&Arc<Buffer>, usize)| buffer.ptr().offset((index * stride) as u64);
        self.buffers.iter().zip(strides).map(at).collect()
    }

    /// One of the pairs, in the same memory.
    pub(crate) fn one(&self, index: usize) -> Result<Self, Error> {
        let part = |(buffer, bytes): (&Arc<Buffer>, usize)| {
            Ok::<_, Error>(Arc::new(Buffer::part(buffer, index * bytes, bytes)?))
        };
        let buffers = self.buffers.iter().zip(self.layout.parts()).map(part).collect::<Result<_, _>>()?;
        Ok(Self { gpu: self.gpu, layout: self.layout, count: 1, buffers })
    }

    /// The same once more, in memory of their own.
    pub(crate) fn duplicate(&self, gpu: &'static Gpu) -> Result<Self, Error> {
        let copies = Self::new(gpu, self.layout, self.count)?;
        for (from, to) in self.buffers.iter().zip(&copies.buffers) {
            gpu.copy_within(to.ptr(), from.ptr(), from.bytes())?;
        }
        gpu.synchronize()?;
        Ok(copies)
    }

    /// The parts, if they are in this order.
    fn addresses<const N: usize>(&self, form: WeightForm) -> Result<[DevicePtr; N], Error> {
        let parts: Vec<DevicePtr> = self.buffers.iter().map(|buffer| buffer.ptr()).collect();
        match parts.try_into() {
            Ok(parts) if self.layout.form == form => Ok(parts),
            _ => {
                let expected = format!("{form}; prepack with the plan that runs them");
                Err(Error::Operand { tensor: "weights", found: self.layout.form.to_string(), expected })
            }
        }
    }

    /// The packs for an operation, behind each other. Fails if they are not packed for it; so do the others say.
    pub(crate) fn packed(&self, op: Operation) -> Result<DevicePtr, Error> {
        self.addresses(WeightForm::packed(op)).map(|[pack]| pack)
    }

    /// The packs of gate and up by themselves.
    pub(crate) fn packed_apart(&self) -> Result<[DevicePtr; 2], Error> {
        self.addresses(WeightForm::PackedApart)
    }

    /// Gate and up of one pair as rows of codes.
    pub(crate) fn plain(&self) -> Result<[Codes; 2], Error> {
        let [gate, up, gate_scales, up_scales] = self.addresses(WeightForm::Plain)?;
        let &Layout { n, k, .. } = &self.layout;
        let half = |codes, scales| Codes { m: n, k, codes, pitch: k / 2, scales };
        Ok([half(gate, gate_scales), half(up, up_scales)])
    }

    /// Gate and up of all pairs as rows: in e4m3, or of codes with scales in rows, or in 128x4 atoms, those of each pair by
    /// themselves; of linear layers their matrices twice.
    pub(crate) fn rows(&self, form: WeightForm, op: Operation) -> Result<[Operand; 2], Error> {
        let null = DevicePtr::NULL;
        let [gate, up, gate_scales, up_scales] = match form.of(op) {
            WeightForm::E4m3 => {
                let [gate, up] = self.addresses(WeightForm::E4m3)?;
                [gate, up, null, null]
            }
            WeightForm::AtomsLinear => {
                let [codes, scales] = self.addresses(WeightForm::AtomsLinear)?;
                [codes, codes, scales, scales]
            }
            form => self.addresses(form)?,
        };
        let &Layout { n, k, format, .. } = &self.layout;
        let format = if form == WeightForm::E4m3 { Format::E4m3 } else { Format::Block(format) };
        let atoms = self.count * n.div_ceil(ATOM_ROWS as usize);
        let half =
            |codes, scales| Operand { atoms, ..Operand::new(format, (self.count * n, k), codes, scales) };
        Ok([half(gate, gate_scales), half(up, up_scales)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> &'static Gpu {
        Gpu::of(Arc::new(dualgemm_sim::Gpu::new(dualgemm_sim::Config::default())))
    }

    #[test]
    fn each_of_several_pairs_is_where_all_of_them_have_it() {
        let gpu = gpu();
        for form in WeightForm::ALL {
            // Sizes whose parts are not multiples of 16 bytes by themselves, where an order does not pad.
            let layout = Layout::new((3, 16), BlockFormat::Nvfp4, form).unwrap();
            let all = Parts::new(gpu, layout, 4).unwrap();
            assert_eq!(all.bytes(), 4 * all.one(0).unwrap().bytes(), "{form}");
            for index in 0..4 {
                let one = all.one(index).unwrap();
                assert_eq!((one.place(0), one.count()), (all.place(index), 1), "{form} {index}");
                assert!(one.place(0).iter().all(|part| part.0.is_multiple_of(16)), "{form} {index}");
            }
            assert!(all.one(4).is_err(), "{form}");
        }
    }

    #[test]
    fn rows_of_all_pairs_are_one_operand_with_atoms_of_each() {
        for (format, block) in [(BlockFormat::Nvfp4, 16), (BlockFormat::Mxfp4, 32)] {
            let layout = Layout::new((130, 96), format, WeightForm::Atoms).unwrap();
            let all = Parts::new(gpu(), layout, 3).unwrap();
            let scales = 2 * 3 * ScaleLayout::Sf128x4.len(130, 96 / block);
            assert_eq!(all.bytes(), 2 * 3 * 130 * 48 + scales, "{format}");
            for half in all.rows(WeightForm::Atoms, Operation::GateUp).unwrap() {
                assert_eq!((half.rows, half.k, half.pitch, half.atoms), (390, 96, 48, 6), "{format}");
            }
        }
    }

    #[test]
    fn an_order_that_is_not_theirs_is_refused_by_name() {
        let gpu = gpu();
        let parts =
            |form| Parts::new(gpu, Layout::new((3, 16), BlockFormat::Nvfp4, form).unwrap(), 1).unwrap();
        let message =
            parts(WeightForm::Packed).rows(WeightForm::Atoms, Operation::GateUp).unwrap_err().to_string();
        let wanted = "weights is packed; the plan asks for rows of codes with 128x4 scales; prepack with the plan that \
                      runs them";
        assert_eq!(message, wanted);
        assert!(
            parts(WeightForm::Plain).rows(WeightForm::Atoms, Operation::GateUp).is_err(),
            "as many parts, another order"
        );
        assert!(
            parts(WeightForm::Atoms).packed(Operation::GateUp).is_err()
                && parts(WeightForm::E4m3).packed_apart().is_err()
        );
        for form in WeightForm::ALL {
            let takes_mxfp4 = Layout::new((3, 32), BlockFormat::Mxfp4, form).is_ok();
            assert_eq!(takes_mxfp4, !matches!(form, WeightForm::Plain | WeightForm::E4m3), "{form}");
        }
    }
}
