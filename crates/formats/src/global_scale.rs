//! The scale of a whole tensor, and what a file held for it.

/// How a file stored a tensor's scale. Producers disagree on multiplier and divisor; inside it is always the
/// multiplier, and this remembers the value the file held so that writing it back loses nothing.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GlobalScaleSource {
    /// The multiplier itself (ModelOpt, torchao, GGUF, ComfyUI).
    Multiplier,
    /// Its reciprocal, as held (compressed-tensors).
    Divisor(f32),
    /// Nothing: the scale is 1 (mxfp4, GGUF without `.scale`).
    Absent,
}

/// The f32 scale of a whole tensor: `value = code · block_scale · global_scale`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GlobalScale {
    multiplier: f32,
    source: GlobalScaleSource,
}

impl GlobalScale {
    /// The scale of a tensor that has none: 1.
    pub const ONE: Self = Self { multiplier: 1.0, source: GlobalScaleSource::Absent };

    /// From the multiplier. Whether it is positive and finite is checked where a matrix takes it.
    pub const fn multiplier(multiplier: f32) -> Self {
        Self { multiplier, source: GlobalScaleSource::Multiplier }
    }

    /// From the reciprocal of the multiplier, as compressed-tensors stores it. Checked as a multiplier is.
    pub const fn divisor(divisor: f32) -> Self {
        Self { multiplier: 1.0 / divisor, source: GlobalScaleSource::Divisor(divisor) }
    }

    /// The multiplier, rounded to f32 where the file held a divisor.
    pub const fn value(self) -> f32 {
        self.multiplier
    }

    /// The multiplier without the rounding of a reciprocal to f32.
    pub fn exact(self) -> f64 {
        match self.source {
            GlobalScaleSource::Divisor(d) => 1.0 / f64::from(d),
            GlobalScaleSource::Multiplier | GlobalScaleSource::Absent => f64::from(self.multiplier),
        }
    }

    /// What the file held.
    pub const fn source(self) -> GlobalScaleSource {
        self.source
    }

    /// The number as the file held it.
    pub const fn held(self) -> f32 {
        match self.source {
            GlobalScaleSource::Divisor(d) => d,
            GlobalScaleSource::Multiplier | GlobalScaleSource::Absent => self.multiplier,
        }
    }

    pub(crate) fn is_valid(self) -> bool {
        // A huge or subnormal divisor is finite while its reciprocal is not a usable multiplier.
        [self.held(), self.multiplier].iter().all(|x| x.is_finite() && *x > 0.0)
    }
}
