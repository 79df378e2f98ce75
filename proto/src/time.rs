//! Times as people read them.

/// Returns a time in microseconds since 1970 as one in UTC to the millisecond, which is the same on every host and sorts.
pub fn timestamp(usec: u64) -> String {
    let (millis, seconds) = (usec / 1000 % 1000, usec / 1_000_000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Converts days to a date of the Gregorian calendar, with years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march + 2) / 5 + 1;
    let month = if march < 10 { march + 3 } else { march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Returns " since TIME" for a text about what began then. Empty: 0, for it is not known.
pub fn since(usec: u64) -> String {
    if usec == 0 { String::new() } else { format!(" since {}", timestamp(usec)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        for (usec, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_868_799_999_000, "2000-02-29T23:59:59.999Z"),
            (1_735_689_599_000_000, "2024-12-31T23:59:59.000Z"),
            (4_107_542_400_000_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(usec), expected);
        }
    }
}
