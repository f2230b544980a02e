//! The bounding box of a tensor map in im2col mode: the arguments that `cuTensorMapEncodeIm2col` has beyond those of
//! the tiled mode. PTX ISA 5.5.4.

use super::{LayoutError, require};

/// Where the base of the filter may lie, in a tensor of images: dimension 0 is channels, then 1 to 3 of space, the
/// last is the image. The box of such a map has two entries: channels per pixel and pixels per column.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Im2col {
    /// First position in each dimension of space, counted from 0.
    pub lower: Vec<i32>,
    /// Last position in each dimension of space, counted from the last element.
    pub upper: Vec<i32>,
}

impl Im2col {
    /// Checks the rules of the driver for a map of `rank` dimensions.
    pub(super) fn validate(&self, rank: usize, box_dims: &[u32]) -> Result<(), LayoutError> {
        require((3..=5).contains(&rank), "tensor map rank", rank, "3 to 5 needed in im2col mode")?;
        let bound = [1 << 15, 1 << 7, 1 << 4][rank - 3];
        for (what, corner) in [("lower", &self.lower), ("upper", &self.upper)] {
            let what = format!("{what} corner of the bounding box");
            let found = format!("{} for rank {rank}", corner.len());
            require(
                corner.len() == rank - 2,
                what.clone(),
                found,
                "one value per dimension of space needed",
            )?;
            for &at in corner {
                let rule = "16, 8 or 5 bits with sign possible for rank 3, 4 or 5";
                require((-bound..bound).contains(&at), what.clone(), at, rule)?;
            }
        }
        let [channels, pixels] = box_dims else {
            let found = format!("{} dimensions", box_dims.len());
            return require(
                false,
                "box",
                found,
                "channels per pixel and pixels per column needed in im2col mode",
            );
        };
        require((1..=256).contains(channels), "channels per pixel", channels, "1 to 256 possible")?;
        require((1..=1024).contains(pixels), "pixels per column", pixels, "1 to 1024 possible")
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Swizzle, TensorDataType, TensorMap};
    use super::*;

    fn images() -> TensorMap {
        let matrix = TensorMap::matrix(TensorDataType::F16, 0x1000, (9, 64), 128, (1, 1), Swizzle::None);
        TensorMap {
            dims: vec![64, 9, 14, 64],
            strides: vec![128, 128 * 9, 128 * 9 * 14],
            box_dims: vec![8, 64],
            element_strides: vec![1, 2, 2, 1],
            im2col: Some(Im2col { lower: vec![-1, -128], upper: vec![0, 127] }),
            ..matrix
        }
    }

    #[test]
    fn record_reads_back_exact() {
        let map = images();
        assert_eq!(map.box_bytes(), 8 * 64 * 2);
        assert_eq!(TensorMap::from_bytes(&map.to_bytes().unwrap()), Ok(map));
    }

    #[test]
    fn every_rule_is_checked() {
        type Break = fn(&mut TensorMap, &mut Im2col);
        let cases: [(Break, &str); 6] = [
            (|_, i| i.lower[1] = -129, "lower corner of the bounding box: -129 found, 16, 8 or 5 bits"),
            (|_, i| i.upper = vec![0], "upper corner of the bounding box: 1 for rank 4 found, one value per"),
            (|m, _| m.box_dims = vec![8], "box: 1 dimensions found, channels per pixel and"),
            (|m, _| m.box_dims[0] = 264, "channels per pixel: 264 found, 1 to 256"),
            (|m, _| m.box_dims[1] = 1025, "pixels per column: 1025 found, 1 to 1024"),
            (|m, _| m.element_strides[1] = 9, "element stride 1: 9 found"),
        ];
        for (change, message) in cases {
            let mut map = images();
            let mut corners = map.im2col.clone().unwrap();
            change(&mut map, &mut corners);
            map.im2col = Some(corners);
            let found = map.validate().unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}");
        }
    }
}
