//! Arguments that several commands take.

use std::{str::FromStr, time::Duration};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};

/// A mount's identity, but for the tag.
#[derive(Args)]
pub struct Name {
    /// The volume's namespace
    pub namespace: String,
    /// The volume's name in the namespace
    pub volume: String,
    /// Who uses it: a job, a unit, a container
    pub consumer: String,
}

#[derive(Args)]
pub struct Wait {
    #[command(flatten)]
    pub deadline: Deadline,
    /// Your own name for the operation, for `csictl cancel`; a random one when absent
    #[arg(long, value_name = "ID")]
    pub operation_id: Option<String>,
}

#[derive(Args)]
pub struct Deadline {
    /// Give up after this time, such as 500ms, 30s, 2min or 1h
    #[arg(long, value_name = "TIME", value_parser = span)]
    deadline: Option<Duration>,
}

impl Deadline {
    pub fn usec(&self) -> Option<u64> {
        self.deadline.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }
}

/// `KEY=VALUE`
#[derive(Clone)]
pub struct Pair(pub String, pub String);

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self(key.to_owned(), value.to_owned())),
            _ => Err("it is not KEY=VALUE".to_owned()),
        }
    }
}

/// The contract's words, for help and completions too.
pub fn words<T>(words: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| word.parse::<T>())
}

/// A number and one unit, as in csid's configuration.
pub fn span(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let millis = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => 0,
    };
    let total = number.parse::<u64>().ok().and_then(|number| number.checked_mul(millis));
    total
        .filter(|total| *total > 0)
        .map(Duration::from_millis)
        .ok_or_else(|| "it is no time, such as 500ms, 30s, 2min or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_csid_reads_them() {
        assert_eq!(span("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(span("30"), Ok(Duration::from_secs(30)));
        assert_eq!(span("2min"), Ok(Duration::from_secs(120)));
        for wrong in ["", "s", "0s", "-1s", "1d", "1 s", "99999999999999999h"] {
            assert!(span(wrong).is_err(), "{wrong:?}");
        }
    }
}
