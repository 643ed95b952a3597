//! Hot loops compiled for more than one machine.
//!
//! The baseline of x86-64 has no packed maximum (or comparison) of 64-bit integers, which is what nearly every loop over times
//! needs. Such loops are written once, as plain portable code, and [`wide!`] compiles them again for AVX2 and AVX-512; which
//! of them runs is found out when the program runs. Results are the same: integers do not round.

/// Defines functions that run as AVX-512 or AVX2 code where the machine has it. Bodies are plain Rust without `unsafe`.
macro_rules! wide {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block
    )*) => {$(
        $(#[$meta])*
        #[allow(clippy::inline_always, reason = "the body must be compiled with the features of its caller")]
        $vis fn $name($($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            fn portable($($arg: $type),*) $(-> $out)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl")]
                fn avx512($($arg: $type),*) $(-> $out)? {
                    portable($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    portable($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512vl") {
                    // SAFETY: the machine has both, as was just found out.
                    return unsafe { avx512($($arg),*) };
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the machine has AVX2, as was just found out.
                    return unsafe { avx2($($arg),*) };
                }
            }
            portable($($arg),*)
        }
    )*};
}

pub(crate) use wide;

#[cfg(test)]
mod tests {
    fn plain(values: &[i64], others: &[i64]) -> i64 {
        values.iter().zip(others).map(|(a, b)| *a.max(b)).max().unwrap_or(i64::MIN)
    }

    wide! {
        fn vector(values: &[i64], others: &[i64]) -> i64 {
            let mut most = i64::MIN;
            for (a, b) in values.iter().zip(others) {
                most = most.max(*a.max(b));
            }
            most
        }
    }

    #[test]
    fn all_lengths_and_signs_give_what_plain_code_gives() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state ^ (state >> 29)) as i64
        };
        for len in 0..100 {
            let (a, b): (Vec<i64>, Vec<i64>) = (0..len).map(|_| (next(), next())).unzip();
            assert_eq!(vector(&a, &b), plain(&a, &b), "length {len}");
        }
    }
}
