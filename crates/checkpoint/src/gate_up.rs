//! The order of gate and up rows in a fused tensor: one index function, used for codes, scales and biases.

use std::str::FromStr;

use crate::Error;
use crate::error::list;

/// Gate or up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// The projection that goes through the activation.
    Gate,
    /// The projection that multiplies it.
    Up,
}

dualgemm_formats::named! {
    /// How the `2 N` rows of a fused gate/up tensor are arranged.
    ///
    /// ```text
    /// gate-up        g0 g1 … u0 u1 …          Hugging Face, vLLM, compressed-tensors, ModelOpt
    /// up-gate        u0 u1 … g0 g1 …          FlashInfer CUTLASS MoE, TensorRT-LLM
    /// up-gate-64     u0…u63 g0…g63 u64…       FlashInfer CuteDSL, TensorRT-LLM CuteDSL
    /// up-gate-32     u0…u31 g0…g31 u32…       cuDNN gemm_swiglu
    /// gate-up-rows   g0 u0 g1 u1 …            gpt-oss
    /// up-gate-rows   u0 g0 u1 g1 …            TensorRT-LLM before its shuffle
    /// trtllm-gen     u0 u2 … u14 g0 g2 … g14 u1 u3 … g15 u16 …   TensorRT-LLM-gen: up-gate-rows, 32 rows shuffled
    /// ```
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum GateUpOrder {
        /// All gate rows, then all up rows.
        GateUp = "gate-up",
        /// All up rows, then all gate rows.
        UpGate = "up-gate",
        /// 64 up rows, 64 gate rows, alternating.
        #[serde(rename = "up-gate-64")]
        UpGate64 = "up-gate-64",
        /// 32 up rows, 32 gate rows, alternating.
        #[serde(rename = "up-gate-32")]
        UpGate32 = "up-gate-32",
        /// Gate row, up row, alternating.
        GateUpRows = "gate-up-rows",
        /// Up row, gate row, alternating.
        UpGateRows = "up-gate-rows",
        /// `UpGateRows` shuffled inside blocks of 32 rows (`shuffle_matrix_a`, `epilogue_tile_m` 128).
        TrtllmGen = "trtllm-gen",
    }
}

impl GateUpOrder {
    /// What the number of rows of the fused tensor must be a multiple of.
    pub const fn row_multiple(self) -> usize {
        match self {
            Self::GateUp | Self::UpGate | Self::GateUpRows | Self::UpGateRows => 2,
            Self::UpGate64 => 128,
            Self::UpGate32 => 64,
            Self::TrtllmGen => 32,
        }
    }

    /// Row of the fused tensor of `2 n` rows that holds row `row`, below `n`, of a half. `2 n` is a multiple of
    /// [`row_multiple`](Self::row_multiple).
    #[inline]
    pub const fn fused_row(self, half: Half, row: usize, n: usize) -> usize {
        let is_up = matches!(half, Half::Up) as usize;
        let is_gate = 1 - is_up;
        match self {
            Self::GateUp => is_up * n + row,
            Self::UpGate => is_gate * n + row,
            Self::UpGate64 => row / 64 * 128 + is_gate * 64 + row % 64,
            Self::UpGate32 => row / 32 * 64 + is_gate * 32 + row % 32,
            Self::GateUpRows => 2 * row + is_up,
            Self::UpGateRows => 2 * row + is_gate,
            Self::TrtllmGen => {
                let source = 2 * row + is_gate;
                source / 32 * 32 + source % 4 * 8 + source % 32 / 4
            }
        }
    }

    /// First row of a half that lies in one piece, if it does.
    pub(crate) const fn contiguous(self, half: Half, n: usize) -> Option<usize> {
        match self {
            Self::GateUp | Self::UpGate => Some(self.fused_row(half, 0, n)),
            _ => None,
        }
    }

    /// Every spelling, for messages.
    pub fn names() -> String {
        list(Self::ALL)
    }
}

impl FromStr for GateUpOrder {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let unknown = || Error::Name { what: "gate/up order", found: s.into(), valid: Self::names() };
        Self::by_name(s).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_is_a_permutation() {
        for order in GateUpOrder::ALL {
            for n in [64usize, 128, 192].map(|n| n.next_multiple_of(order.row_multiple() / 2)) {
                let mut seen = vec![false; 2 * n];
                for half in [Half::Gate, Half::Up] {
                    for row in 0..n {
                        assert!(
                            !std::mem::replace(&mut seen[order.fused_row(half, row, n)], true),
                            "{order}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn orders_lie_as_drawn() {
        let n = 128;
        let at = |order: GateUpOrder, fused: usize| {
            [Half::Gate, Half::Up]
                .into_iter()
                .find_map(|half| {
                    let row = (0..n).find(|&row| order.fused_row(half, row, n) == fused)?;
                    Some(format!("{}{row}", if half == Half::Gate { "g" } else { "u" }))
                })
                .unwrap()
        };
        let first = |order, rows: &[usize]| rows.iter().map(|&r| at(order, r)).collect::<Vec<_>>().join(" ");
        assert_eq!(first(GateUpOrder::GateUp, &[0, 1, 128]), "g0 g1 u0");
        assert_eq!(first(GateUpOrder::UpGate, &[0, 1, 128]), "u0 u1 g0");
        assert_eq!(first(GateUpOrder::UpGate64, &[0, 63, 64, 127, 128]), "u0 u63 g0 g63 u64");
        assert_eq!(first(GateUpOrder::UpGate32, &[0, 31, 32, 63, 64]), "u0 u31 g0 g31 u32");
        assert_eq!(first(GateUpOrder::GateUpRows, &[0, 1, 2]), "g0 u0 g1");
        assert_eq!(first(GateUpOrder::UpGateRows, &[0, 1, 2]), "u0 g0 u1");
        // Sources 0, 1, 2, 3, 4 … of the alternating order go to 0, 8, 16, 24, 1 …
        assert_eq!(first(GateUpOrder::TrtllmGen, &[0, 8, 16, 24, 1, 9, 31, 32]), "u0 g0 u1 g1 u2 g2 g15 u16");
    }

    #[test]
    fn spellings_round_trip_and_errors_list_them() {
        for order in GateUpOrder::ALL {
            assert_eq!(order.name().parse::<GateUpOrder>().unwrap(), order);
            assert_eq!(serde_json::to_value(order).unwrap(), order.name());
        }
        assert_eq!(
            "gateup".parse::<GateUpOrder>().unwrap_err().to_string(),
            "gate/up order `gateup` is unknown; valid are gate-up, up-gate, up-gate-64, up-gate-32, \
             gate-up-rows, up-gate-rows, trtllm-gen"
        );
    }
}
