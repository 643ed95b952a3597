//! Golomb rulers: sets of marks whose pairwise distances are all different.
//!
//! Placed on a circle of more than twice its length, a ruler makes any two groups share at most one shard type, so that the
//! types of failed groups spread over as many survivors as possible.

/// Marks of an optimal (shortest) ruler of each order from 1 to 28.
const OPTIMAL: [&[u32]; 28] = [
    &[0],
    &[0, 1],
    &[0, 1, 3],
    &[0, 1, 4, 6],
    &[0, 1, 4, 9, 11],
    &[0, 1, 4, 10, 12, 17],
    &[0, 1, 4, 10, 18, 23, 25],
    &[0, 1, 4, 9, 15, 22, 32, 34],
    &[0, 1, 5, 12, 25, 27, 35, 41, 44],
    &[0, 1, 6, 10, 23, 26, 34, 41, 53, 55],
    &[0, 1, 4, 13, 28, 33, 47, 54, 64, 70, 72],
    &[0, 2, 6, 24, 29, 40, 43, 55, 68, 75, 76, 85],
    &[0, 2, 5, 25, 37, 43, 59, 70, 85, 89, 98, 99, 106],
    &[0, 4, 6, 20, 35, 52, 59, 77, 78, 86, 89, 99, 122, 127],
    &[0, 4, 20, 30, 57, 59, 62, 76, 100, 111, 123, 136, 144, 145, 151],
    &[0, 1, 4, 11, 26, 32, 56, 68, 76, 115, 117, 134, 150, 163, 168, 177],
    &[0, 5, 7, 17, 52, 56, 67, 80, 81, 100, 122, 138, 159, 165, 168, 191, 199],
    &[0, 2, 10, 22, 53, 56, 82, 83, 89, 98, 130, 148, 153, 167, 188, 192, 205, 216],
    &[0, 1, 6, 25, 32, 72, 100, 108, 120, 130, 153, 169, 187, 190, 204, 231, 233, 242, 246],
    &[0, 1, 8, 11, 68, 77, 94, 116, 121, 156, 158, 179, 194, 208, 212, 228, 240, 253, 259, 283],
    &[0, 2, 24, 56, 77, 82, 83, 95, 129, 144, 179, 186, 195, 255, 265, 285, 293, 296, 310, 329, 333],
    &[0, 1, 9, 14, 43, 70, 106, 122, 124, 128, 159, 179, 204, 223, 253, 263, 270, 291, 330, 341, 353, 356],
    &[0, 3, 7, 17, 61, 66, 91, 99, 114, 159, 171, 199, 200, 226, 235, 246, 277, 316, 329, 348, 350, 366, 372],
    &[0, 9, 33, 37, 38, 97, 122, 129, 140, 142, 152, 191, 205, 208, 252, 278, 286, 326, 332, 353, 368, 384, 403, 425],
    &[
        0, 12, 29, 39, 72, 91, 146, 157, 160, 161, 166, 191, 207, 214, 258, 290, 316, 354, 372, 394, 396, 431, 459,
        467, 480,
    ],
    &[
        0, 1, 33, 83, 104, 110, 124, 163, 185, 200, 203, 249, 251, 258, 314, 318, 343, 356, 386, 430, 440, 456, 464,
        475, 487, 492,
    ],
    &[
        0, 3, 15, 41, 66, 95, 97, 106, 142, 152, 220, 221, 225, 242, 295, 330, 338, 354, 382, 388, 402, 415, 486, 504,
        523, 546, 553,
    ],
    &[
        0, 3, 15, 41, 66, 95, 97, 106, 142, 152, 220, 221, 225, 242, 295, 330, 338, 354, 382, 388, 402, 415, 486, 504,
        523, 546, 553, 585,
    ],
];

/// Highest order whose shortest ruler is in the table.
pub const MAX_ORDER: u32 = OPTIMAL.len() as u32;

/// Marks of a shortest ruler of order `r`, or `None` beyond [`MAX_ORDER`].
#[must_use]
pub fn optimal(r: u32) -> Option<&'static [u32]> {
    OPTIMAL.get((r as usize).checked_sub(1)?).copied()
}

/// Highest order whose ruler fits on a circle of `n` groups: `n > 2 x length - 1` keeps all distances different both ways
/// round.
#[must_use]
pub fn max_order(n: u32) -> u32 {
    (1..=MAX_ORDER).rev().find(|r| fits(n, *r)).unwrap_or(1)
}

/// Does the ruler of order `r` fit on a circle of `n` groups?
#[must_use]
pub fn fits(n: u32, r: u32) -> bool {
    optimal(r).is_some_and(|marks| i64::from(n) > 2 * i64::from(marks[marks.len() - 1]) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn rulers_have_distinct_distances_and_the_known_shortest_lengths() {
        let lengths = [
            0, 1, 3, 6, 11, 17, 25, 34, 44, 55, 72, 85, 106, 127, 151, 177, 199, 216, 246, 283, 333, 356, 372, 425,
            480, 492, 553, 585,
        ];
        for (marks, length) in OPTIMAL.iter().zip(lengths) {
            assert_eq!(marks[marks.len() - 1], length);
            let mut distances = BTreeSet::new();
            for (at, high) in marks.iter().enumerate() {
                for low in &marks[..at] {
                    assert!(high > low && distances.insert(high - low), "{marks:?}: {high} - {low}");
                }
            }
        }
    }

    #[test]
    fn the_circle_limits_the_order() {
        assert_eq!([7, 200, 600, 1000].map(max_order), [3, 12, 20, 26]);
    }
}
