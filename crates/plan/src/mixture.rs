//! What stands around the products of a mixture of experts on a GPU: sorting before them, summing after.

use dualgemm_device::{DevicePtr, Stream};
use dualgemm_formats::FloatType;
pub use dualgemm_kernels::generic::mixture::Sizes;
use dualgemm_kernels::generic::mixture::{Lists, Mixture, RowOf};

use crate::launches::Launches;
use crate::{Buffer, DeviceA, DeviceC, DeviceCall, Error, Gpu, GroupedCall};

/// A call on a mixture whose operands are in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MixtureCall {
    /// A and C of the tokens. A is floats of 16 bits.
    pub call: DeviceCall,
    /// Experts of each token, `[m, top_k]` i32; negative ones, and those that there are not, are skipped.
    pub ids: DevicePtr,
    /// Their weights, `[m, top_k]` f32.
    pub weights: DevicePtr,
    /// Whether results are added to what C holds.
    pub add: bool,
}

/// Kernels and memory around the products.
#[derive(Debug)]
pub struct AroundExperts {
    gpu: &'static Gpu,
    kernels: Mixture,
    sizes: Sizes,
    k: usize,
    n: usize,
    /// First rows, rows and choices, behind each other.
    lists: Buffer,
    /// Rows of A by expert; none where the products find them by the choices.
    gathered: Option<Buffer>,
    results: Buffer,
    /// Weights of results where the router's multiply A.
    ones: Option<Buffer>,
    before: Launches,
    /// Of calls that write C, and of those that add to it.
    after: [Launches; 2],
}

impl AroundExperts {
    /// For up to `sizes.tokens` tokens of `k` elements of 16 bits, and `n` features of C; `unsorted` if both products
    /// [take](crate::strategy::Prepared::takes_choices) choices as they are. Where the router's weights multiply A, `weighs` is
    /// its type, and choices are sorted.
    ///
    /// # Errors
    /// If a size is beyond the kernels, or memory is lacking.
    pub fn new(
        gpu: &'static Gpu,
        sizes: Sizes,
        [k, n]: [usize; 2],
        out: FloatType,
        (unsorted, weighs): (bool, Option<FloatType>),
    ) -> Result<Self, Error> {
        let choices = sizes.choices()? as usize;
        let gathered = || Buffer::new(gpu, (choices * k * 2).next_multiple_of(16));
        Ok(Self {
            gpu,
            kernels: Mixture::new(gpu, out, weighs)?,
            sizes,
            k,
            n,
            lists: Buffer::new(gpu, 4 * (sizes.experts + 1 + 2 * choices))?,
            gathered: (!unsorted || weighs.is_some()).then(gathered).transpose()?,
            results: Buffer::new(gpu, choices * n * 4)?,
            ones: weighs.map(|_| Buffer::of(gpu, &1f32.to_le_bytes().repeat(choices))).transpose()?,
            before: Launches::default(),
            after: Default::default(),
        })
    }

    fn lists(&self) -> Lists {
        let (rows, after_rows) = (self.lists.ptr(), 4 * (self.sizes.experts as u64 + 1));
        let row_of = rows.offset(after_rows);
        let choice_of = row_of.offset(4 * (self.sizes.tokens * self.sizes.top_k) as u64);
        Lists { rows, row_of, choice_of }
    }

    fn sizes(&self, call: &MixtureCall) -> Result<Sizes, Error> {
        let tokens = call.call.m;
        if tokens == 0 || tokens > self.sizes.tokens {
            let (found, expected) = (format!("{tokens} rows"), format!("1 to {} rows", self.sizes.tokens));
            return Err(Error::Operand { tensor: "A", found, expected });
        }
        Ok(Sizes { tokens, ..self.sizes })
    }

    /// The call of the first product, on rows by expert or on choices, whose C is `c`.
    pub fn gate_up(&self, call: &MixtureCall, c: DeviceC) -> GroupedCall {
        let m = call.call.m * self.sizes.top_k;
        let (a, rows, choices) = match &self.gathered {
            None => (call.call.a, call.ids, Some(self.sizes.top_k)),
            Some(gathered) => {
                (DeviceA::Float { values: gathered.ptr(), pitch: 2 * self.k }, self.lists().rows, None)
            }
        };
        GroupedCall { call: DeviceCall { m, a, c }, rows, settled: false, choices }
    }

    /// The call of the second product, on what the first left.
    pub fn down(&self, call: &MixtureCall, a: DeviceA) -> GroupedCall {
        let (m, c) = (call.call.m * self.sizes.top_k, DeviceC::Float(self.results.ptr()));
        let (rows, choices) = match self.gathered {
            Some(_) => (self.lists().rows, None),
            None => (call.ids, Some(1)),
        };
        GroupedCall { call: DeviceCall { m, a, c }, rows, settled: true, choices }
    }

    /// Whether the products take choices as they are.
    pub fn unsorted(&self) -> bool {
        self.gathered.is_none()
    }

    /// Launches what comes before the products, if anything does.
    ///
    /// # Safety
    /// A and the lists of experts are live memory of this GPU, as large as the call makes them, until the call has ended.
    ///
    /// # Errors
    /// If an operand is misaligned or of another format; what the device says of a launch.
    pub unsafe fn before(&self, call: &MixtureCall, stream: Stream) -> Result<(), Error> {
        let Some(gathered) = &self.gathered else { return self.sizes(call).map(drop) };
        let specs = || {
            let DeviceA::Float { values, pitch } = call.call.a else {
                let found = call.call.a.kind().into();
                return Err(Error::Operand { tensor: "A", found, expected: "floats of 16 bits".into() });
            };
            let (sizes, lists) = (self.sizes(call)?, self.lists());
            let a = (values, pitch, self.k);
            Ok(self.kernels.by_expert(&sizes, (call.ids, call.weights), a, &lists, gathered.ptr())?)
        };
        let mut key = call.call.key();
        if self.ones.is_some() {
            // Other launches do not look at the weights, wherever they are.
            key[8] = call.weights.0;
        }
        // SAFETY: lists and rows have room for all choices; the caller vouches for the rest.
        unsafe { self.before.run(self.gpu, (call.ids.0, key), stream, specs) }
    }

    /// Launches what comes after the products.
    ///
    /// # Safety
    /// C and the weights are live memory of this GPU, as large as the call makes them, until the call has ended.
    ///
    /// # Errors
    /// As [`before`](Self::before).
    pub unsafe fn after(&self, call: &MixtureCall, stream: Stream) -> Result<(), Error> {
        let specs = || {
            let DeviceC::Float(c) = call.call.c else {
                return Err(Error::Operand { tensor: "C", found: "nvfp4".into(), expected: "floats".into() });
            };
            let results = (self.results.ptr(), self.n);
            let rows = match self.gathered {
                Some(_) => RowOf::Listed(self.lists().row_of),
                None => RowOf::Itself(call.ids),
            };
            let sizes = self.sizes(call)?;
            let weights = self.ones.as_ref().map_or(call.weights, Buffer::ptr);
            Ok(vec![self.kernels.combine(&sizes, results, (rows, weights), (c, call.add))?])
        };
        let after = &self.after[usize::from(call.add)];
        let mut key = call.call.key();
        key[8] = call.ids.0;
        // SAFETY: as in `before`.
        unsafe { after.run(self.gpu, (call.weights.0, key), stream, specs) }
    }
}
