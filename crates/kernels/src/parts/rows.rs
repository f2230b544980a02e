//! C in global memory: how a thread stores consecutive features of one token, or a single element.

use dualgemm_ptx::builder::*;

/// Element type of C.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Out {
    /// Binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// Binary32.
    F32,
}

impl Out {
    /// Bytes of an element.
    pub const fn bytes(self) -> u32 {
        match self {
            Out::F16 | Out::Bf16 => 2,
            Out::F32 => 4,
        }
    }

    /// Whether rows of `n` features start at multiples of 16 bytes.
    pub const fn rows_are_aligned(self, n: usize) -> bool {
        (n * self.bytes() as usize).is_multiple_of(16)
    }
}

/// C, `[m, n]` row by row.
pub(crate) struct Rows {
    pub out: Out,
    /// Rows start at multiples of 16 bytes.
    pub aligned: bool,
    pub start: PointerParam,
    pub m: Reg<U32>,
    pub n: Reg<U32>,
}

impl Rows {
    fn place(&self, k: &mut Kernel, token: Reg<U32>, feature: Reg<U32>) -> Addr<Global> {
        let start = k.ld_pointer(&self.start);
        let row = k.mul_wide(token, self.n);
        let feature = k.convert::<U64, U32>(feature);
        let element = k.add(row, feature);
        let byte = k.shl(element, self.out.bytes().ilog2());
        k.offset(start, byte)
    }

    /// Stores one element, if it is inside.
    pub fn store_element(&self, k: &mut Kernel, token: Reg<U32>, feature: Reg<U32>, value: Reg<F32>) {
        let inside = k.compare(Cmp::Lt, token, self.m);
        let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
        let to = self.place(k, token, feature);
        match self.out {
            Out::F16 => {
                let value = k.f32_to_f16(value);
                k.when(inside).st(to, value);
            }
            Out::Bf16 => {
                let value = k.f32_to_bf16(value);
                k.when(inside).st(to, value);
            }
            Out::F32 => k.when(inside).st(to, value),
        }
    }

    /// Stores consecutive features of one token from a multiple of 16 on, those that are inside, 16 bytes at a time
    /// where rows allow it.
    pub fn store_features(&self, k: &mut Kernel, token: Reg<U32>, feature: Reg<U32>, values: &[Reg<F32>]) {
        if !self.aligned {
            for (i, &value) in (0u32..).zip(values) {
                let feature = k.add(feature, i);
                self.store_element(k, token, feature, value);
            }
            return;
        }
        let words: Vec<Reg<B32>> = match self.out {
            Out::F16 => values.chunks_exact(2).map(|v| k.f32_to_f16x2(v[0], v[1]).cast()).collect(),
            Out::Bf16 => values.chunks_exact(2).map(|v| k.f32_to_bf16x2(v[0], v[1]).cast()).collect(),
            Out::F32 => values.iter().map(|&v| k.to_bits(v)).collect(),
        };
        let inside = k.compare(Cmp::Lt, token, self.m);
        let to = self.place(k, token, feature);
        let per_piece = 16 / self.out.bytes();
        for (i, piece) in (0u32..).zip(words.chunks_exact(4)) {
            let feature = k.add(feature, i * per_piece);
            let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
            k.when(inside).st_vector(to.at(i * 16), piece);
        }
    }
}
