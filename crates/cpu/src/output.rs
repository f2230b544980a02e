//! From values of C to bytes of C: f32, f16, bf16, or nvfp4 for the down projection.
//!
//! Conversions round f32 once, to nearest, ties to even. Blocks of nvfp4 follow Transformer Engine's rule
//! ([`Producer::Te`]), as in GPU kernels that write nvfp4. With a dynamic tensor scale, C is either kept in f32 until its
//! largest magnitude is known and then quantized in a second pass, or computed twice.

use std::sync::atomic::{AtomicU32, Ordering};

use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, Producer, ScaleLayout, Search};
use dualgemm_gemm::{OutFormat, OutScale, OutputMut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::Error;
use crate::epilogue::TileEpilogue;
use crate::isa::{InstructionSet, Work};
use crate::lanes;
use crate::pack::PANEL;
use crate::threads::{self, SharedSlice};
use crate::tile::{RowTile, TILE_COLS, Tile, TileSink};
use crate::w4a16::ahead::{self, Ahead};
use crate::workspace::Group;

/// Finishes tiles and writes them to C, `[rows, n]`.
#[derive(Debug)]
pub(crate) struct OutputSink<'a> {
    /// Turns sums into values.
    pub(crate) epilogue: &'a TileEpilogue,
    /// The groups that the rows belong to.
    pub(crate) groups: &'a [Group<'a>],
    /// The tensor scale of A.
    pub(crate) a_scale: f64,
    /// Columns of C.
    pub(crate) n: usize,
    pub(crate) c: Destination<'a>,
}

/// Where values of C go, and in which type.
#[derive(Debug)]
pub(crate) enum Destination<'a> {
    F32(SharedSlice<'a, f32>),
    F16(SharedSlice<'a, f16>),
    Bf16(SharedSlice<'a, bf16>),
    /// Bf16 that the next product multiplies.
    Ahead(Ahead<'a>),
    Nvfp4(Nvfp4<'a>, Quantizer),
    /// To a buffer until the tensor scale is known.
    Deferred(SharedSlice<'a, f32>, Amax),
    /// Nowhere: only the tensor scale is computed.
    Amax(Amax),
}

/// Where an element of C goes, and those below it in a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    Rows { first: usize, n: usize },
    Tiles(ahead::Place),
}

impl Place {
    /// The element so many rows below.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize) -> usize {
        match self {
            Self::Rows { first, n } => first + row * n,
            Self::Tiles(place) => place.at(row),
        }
    }
}

/// The buffers of an nvfp4 C.
#[derive(Debug)]
pub(crate) struct Nvfp4<'a> {
    codes: SharedSlice<'a, u8>,
    scales: SharedSlice<'a, u8>,
    scale_layout: ScaleLayout,
}

impl<'a> Destination<'a> {
    /// The destination for `rows` rows of a C that is planned as `format`. If its tensor scale is dynamic, the values go to
    /// `deferred`, which has room for all of them, or nowhere. Then the buffers of C come back, for use once the scale is known.
    /// Fails if `out` has another format or size.
    pub(crate) fn new(
        format: OutFormat,
        out: OutputMut<'a>,
        rows: usize,
        n: usize,
        deferred: Option<&'a mut [f32]>,
    ) -> Result<(Self, Option<Nvfp4<'a>>), Error> {
        let values = rows * n;
        let expected = |bytes: String| format!("{format} of {bytes}");
        let fault = |found: String, expected: String| Error::NotPlanned { what: "C", found, expected };
        if let Some((found, len)) = out.floats()
            && format == found.into()
            && len != values
        {
            return Err(fault(format!("{found} of {len} values"), expected(format!("{rows} × {n} values"))));
        }
        Ok(match (format, out) {
            (OutFormat::F32, OutputMut::F32(c)) => (Self::F32(SharedSlice::new(c)), None),
            (OutFormat::F16, OutputMut::F16(c)) => (Self::F16(SharedSlice::new(c)), None),
            (OutFormat::Bf16, OutputMut::Bf16(c)) => (Self::Bf16(SharedSlice::new(c)), None),
            (OutFormat::Nvfp4 { scale_layout, global_scale }, OutputMut::Nvfp4 { codes, scales }) => {
                let scale_bytes = scale_layout.len(rows, n / BlockFormat::Nvfp4.block_len());
                if (codes.len(), scales.len()) != (values / 2, scale_bytes) {
                    let found = format!("nvfp4 of {} code and {} scale bytes", codes.len(), scales.len());
                    let expected = expected(format!("{} code and {scale_bytes} scale bytes", values / 2));
                    return Err(fault(found, expected));
                }
                // Padding, which some layouts have between the scales, must be zero.
                scales.fill(0);
                let (codes, scales) = (SharedSlice::new(codes), SharedSlice::new(scales));
                let buffers = Nvfp4 { codes, scales, scale_layout };
                match global_scale {
                    OutScale::Static(scale) => {
                        (Self::Nvfp4(buffers, quantizer(GlobalScale::multiplier(scale))), None)
                    }
                    OutScale::Dynamic => {
                        let c = match deferred {
                            Some(c) => Self::Deferred(SharedSlice::new(&mut c[..values]), Amax::default()),
                            None => Self::Amax(Amax::default()),
                        };
                        (c, Some(buffers))
                    }
                }
            }
            (_, out) => {
                let found = out.floats().map_or("nvfp4", |(found, _)| found.name());
                return Err(fault(found.into(), format.to_string()));
            }
        })
    }
}

impl Destination<'_> {
    /// Whether values go to C as they are.
    pub(crate) fn is_of_floats(&self) -> bool {
        matches!(self, Self::F32(_) | Self::F16(_) | Self::Bf16(_) | Self::Ahead(_))
    }

    /// The place of an element of C, of `n` columns, and of those below it in the same tile.
    pub(crate) fn place(&self, row: usize, col: usize, n: usize) -> Place {
        match self {
            Self::Ahead(next) => Place::Tiles(next.place(row, col)),
            _ => Place::Rows { first: row * n + col, n },
        }
    }

    /// Fetches the lines of `len` elements of a C of floats, from element `at` on.
    fn fetch(&self, at: usize, len: usize) {
        match self {
            Self::Ahead(next) => next.fetch(at),
            Self::F32(c) | Self::Deferred(c, _) => c.fetch(at, len),
            Self::F16(c) => c.fetch(at, len),
            Self::Bf16(c) => c.fetch(at, len),
            Self::Nvfp4(..) | Self::Amax(_) => {}
        }
    }

    /// Writes values to a C of floats, from element `at` on; nothing elsewhere.
    ///
    /// # Safety
    /// Nobody else may write these elements at the same time.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, at: usize, values: &[f32]) {
        // SAFETY: the caller vouches that these parts are not in use elsewhere.
        unsafe {
            match self {
                Self::F32(c) | Self::Deferred(c, _) => c.part(at, values.len()).copy_from_slice(values),
                Self::F16(c) => c.part(at, values.len()).convert_from_f32_slice(values),
                // Infinities and the NaN of an epilogue stay what they are. Half's function is not made of vectors, and takes long.
                Self::Bf16(c) => {
                    let round = |value: f32| {
                        let bits = value.to_bits();
                        bf16::from_bits(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
                    };
                    let (to, rest) = c.part(at, values.len()).as_chunks_mut();
                    let (values, last) = values.as_chunks();
                    // By way of arrays, which nothing else can lie in: else a loop of known length is no vectors.
                    to.iter_mut().zip(values).for_each(|(to, values)| *to = lanes::map(values, round));
                    rest.iter_mut().zip(last).for_each(|(to, value)| *to = round(*value));
                }
                // It has whole panels. A closure would not be compiled for the instruction set.
                Self::Ahead(next) => {
                    for (i, values) in values.as_chunks().0.iter().enumerate() {
                        next.write(at + i * PANEL, values);
                    }
                }
                Self::Nvfp4(..) | Self::Amax(_) => {}
            }
        }
    }
}

impl TileSink for OutputSink<'_> {
    // Else stores wait for the lines: on 16 threads of an Emerald Rapids, storing 117 MB of f32 takes half as long with this.
    fn fetch(&self, rows: &RowTile, first_col: usize, cols: usize) {
        let place = self.c.place(rows.first_row, first_col, self.n);
        (0..rows.rows).for_each(|row| self.c.fetch(place.at(row), cols));
    }

    fn store(&self, tile: &mut Tile<'_>) {
        let weights = self.groups[tile.rows.group].weights;
        if let Some(finish) = self.epilogue.finish(tile, weights, self.a_scale, (&self.c, self.n)) {
            self.epilogue.isa().dispatch(finish);
            if self.c.is_of_floats() {
                return;
            }
        } else {
            self.epilogue.apply(tile, weights, self.a_scale);
        }
        let rows = &tile.sums.as_chunks::<TILE_COLS>().0[..tile.rows.rows];
        if let Destination::Deferred(_, amax) | Destination::Amax(amax) = &self.c {
            amax.include(rows.iter().flat_map(|row| &row[..tile.cols]));
        }
        // Conversions are compiled for the instruction set.
        self.epilogue.isa().dispatch(Store {
            sink: self,
            rows,
            first_row: tile.rows.first_row,
            first_col: tile.first_col,
            cols: tile.cols,
        });
    }
}

/// What [`OutputSink::store`] compiles per instruction set: rows of values become elements of C.
struct Store<'a> {
    sink: &'a OutputSink<'a>,
    rows: &'a [[f32; TILE_COLS]],
    first_row: usize,
    first_col: usize,
    cols: usize,
}

impl Work for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let (n, cols) = (self.sink.n, self.cols);
        let place = self.sink.c.place(self.first_row, self.first_col, n);
        for (i, values) in self.rows.iter().enumerate() {
            let (row, at) = (self.first_row + i, place.at(i));
            // SAFETY: the schedule makes each element of C part of one tile and stores each tile once, so no two threads write
            // the same element or block.
            unsafe {
                match &self.sink.c {
                    Destination::Nvfp4(buffers, quantizer) => {
                        for (block, values) in values[..cols].as_chunks::<PANEL>().0.iter().enumerate() {
                            let block = self.first_col / PANEL + block;
                            buffers.write(quantizer, row, block, n / PANEL, values);
                        }
                    }
                    // Rows of whole panels have a length that the compiler knows.
                    floats if cols == PANEL => floats.write(at, &values[..PANEL]),
                    floats if cols == TILE_COLS => floats.write(at, values),
                    floats => floats.write(at, &values[..cols]),
                }
            }
        }
    }
}

impl Nvfp4<'_> {
    /// Quantizes one block.
    ///
    /// # Safety
    /// Nobody else may write this block at the same time.
    unsafe fn write(
        &self,
        quantizer: &Quantizer,
        row: usize,
        block: usize,
        blocks: usize,
        values: &[f32; PANEL],
    ) {
        let (codes, scale) = quantizer.block(values);
        // SAFETY: each block has eight code bytes of its own, and nobody else writes this block.
        unsafe { self.codes.part((row * blocks + block) * 8, 8) }.copy_from_slice(&codes);
        let at = self.scale_layout.offset(row, block, blocks);
        // SAFETY: the layout gives each block a byte of its own, and nobody else writes this block.
        unsafe { self.scales.part(at, 1) }.fill(scale);
    }
}

/// The second pass of a dynamic tensor scale: quantizes the rows of `groups`.
pub(crate) fn quantize_deferred(
    threads: usize,
    values: &SharedSlice<'_, f32>,
    quantizer: &Quantizer,
    n: usize,
    groups: &[Group<'_>],
    to: &Nvfp4<'_>,
) {
    let rows = groups.last().map_or(0, |group| group.first_row + group.rows);
    threads::for_each(
        threads,
        rows,
        |_| (),
        |(), row| {
            // Groups are in order; rows between them belong to no group.
            let group = groups.partition_point(|group| group.first_row + group.rows <= row);
            if groups[group].first_row <= row {
                // SAFETY: `for_each` hands out each row once.
                let blocks = unsafe { values.part(row * n, n) }.as_chunks::<PANEL>().0;
                for (block, values) in blocks.iter().enumerate() {
                    // SAFETY: the block belongs to this row alone, which `for_each` hands out once.
                    unsafe { to.write(quantizer, row, block, blocks.len(), values) };
                }
            }
        },
    );
}

/// The quantizer of C for a tensor scale.
pub(crate) fn quantizer(scale: GlobalScale) -> Quantizer {
    Quantizer::new(Producer::Te, scale, FloatType::F32, Search::Plain)
}

/// The largest magnitude that any thread saw. NaN does not count.
#[derive(Debug, Default)]
pub(crate) struct Amax(AtomicU32);

impl Amax {
    fn include<'v>(&self, values: impl Iterator<Item = &'v f32>) {
        // Magnitudes order as their bits do, NaN above infinity.
        let magnitudes = values.map(|x| x.to_bits() & 0x7FFF_FFFF);
        let largest = magnitudes.map(|x| if x > 0x7F80_0000 { 0 } else { x }).fold(0, u32::max);
        self.0.fetch_max(largest, Ordering::Relaxed);
    }

    /// The tensor scale for this magnitude.
    pub(crate) fn global_scale(&self) -> GlobalScale {
        Producer::Te.global_scale(f32::from_bits(self.0.load(Ordering::Relaxed)), FloatType::F32)
    }
}
