//! Slices: the partial products that the matrices of a layer are computed in (Shoeybi et al., arXiv
//! 1909.08053).

use super::{ManifestError, Model, within};
use crate::limits;

impl Model {
    /// The model of one slice: its share of the heads and of the width inside the feed-forward block.
    #[must_use]
    pub fn slice(&self) -> Self {
        let mut slice = self.clone();
        let count = u32::from(self.slices);
        slice.block.head_size = Some(self.head_size());
        slice.heads /= count;
        slice.key_value_heads /= count;
        slice.intermediate /= count;
        if let Some(experts) = &mut slice.block.experts {
            experts.intermediate /= count;
            experts.shared_intermediate = experts.shared_intermediate.map(|width| width / count);
        }
        slice.slices = 1;
        slice
    }

    /// Checks that slices are equal parts of a layer.
    pub(super) fn check_slices(&self) -> Result<(), ManifestError> {
        within("model.slices", self.slices, 1..=limits::SLICES)?;
        let Self { heads, key_value_heads, intermediate, .. } = *self;
        let counts = [heads, key_value_heads, intermediate];
        if !counts.iter().all(|count| count.is_multiple_of(u32::from(self.slices))) {
            return Err(ManifestError::OutOfRange {
                key: "model.slices",
                value: self.slices.to_string(),
                range: format!(
                    "a divisor of heads = {heads}, key_value_heads = {key_value_heads} and intermediate = \
                     {intermediate}"
                ),
            });
        }
        if self.block.sinks && self.slices > 1 {
            return Err(ManifestError::OutOfRange {
                key: "model.slices",
                value: self.slices.to_string(),
                range: "1 in a model whose heads have sinks".to_owned(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Manifest;
    use super::super::example::small;

    fn sliced(slices: u16) -> Manifest {
        let mut manifest = small();
        (manifest.model.heads, manifest.model.key_value_heads) = (8, 4);
        manifest.model.hidden = 64;
        manifest.model.slices = slices;
        manifest
    }

    #[test]
    fn slices_divide_heads_and_the_inner_width() {
        for slices in [1, 2, 4] {
            assert_eq!(sliced(slices).check(), Ok(()));
        }
        for slices in [0, 3, 8, 65] {
            let error = sliced(slices).check().expect_err("refused").to_string();
            assert!(error.starts_with("model.slices = "), "{error}");
        }
        let mut manifest = sliced(2);
        manifest.model.block.sinks = true;
        let error = manifest.check().expect_err("refused").to_string();
        assert!(error.contains("whose heads have sinks"), "{error}");
        let slice = sliced(4).model.slice();
        assert_eq!((slice.heads, slice.key_value_heads, slice.intermediate), (2, 1, 16));
        assert_eq!(slice.head_size(), sliced(4).model.head_size());
        assert_eq!(slice.check(), Ok(()));
    }
}
