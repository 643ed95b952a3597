//! Reading position in a piece of text that ends with a newline.

/// Position in complete lines; every step stays inside them, because the text ends with a newline.
pub(super) struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

/// What stands where a number should.
pub(super) enum Digits {
    /// No digit.
    None,
    Number(u64),
    /// More than 64 bits.
    TooLarge,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        debug_assert!(text.last().is_none_or(|last| *last == b'\n'), "complete lines");
        Self { text, at: 0 }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at >= self.text.len()
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        &self.text[self.at.min(self.text.len())..]
    }

    /// The next byte; a newline at the end.
    #[inline]
    pub(super) fn peek(&self) -> u8 {
        self.text.get(self.at).copied().unwrap_or(b'\n')
    }

    #[inline]
    pub(super) fn skip(&mut self, bytes: usize) {
        self.at += bytes;
    }

    #[inline]
    pub(super) fn spaces(&mut self) {
        while matches!(self.peek(), b' ' | b'\t') {
            self.at += 1;
        }
    }

    /// Takes `word` if it comes next.
    #[inline]
    pub(super) fn eat(&mut self, word: &[u8]) -> bool {
        let comes = self.text.get(self.at..self.at + word.len()) == Some(word);
        if comes {
            self.at += word.len();
        }
        comes
    }

    /// Takes spaces, then `word` if it comes next.
    #[inline]
    pub(super) fn eat_word(&mut self, word: &[u8]) -> bool {
        self.spaces();
        self.eat(word)
    }

    /// Takes the end of a line (after spaces): `\n` or `\r\n`.
    #[inline]
    pub(super) fn end_of_line(&mut self) -> bool {
        self.spaces();
        match self.peek() {
            b'\n' => self.at += 1,
            b'\r' if self.text.get(self.at + 1) == Some(&b'\n') => self.at += 2,
            _ => return false,
        }
        true
    }

    /// Takes a number of digits only.
    #[inline]
    pub(super) fn digits(&mut self) -> Digits {
        let start = self.at;
        let mut value = 0_u64;
        loop {
            let digit = self.peek().wrapping_sub(b'0');
            if digit > 9 {
                break;
            }
            value = value.wrapping_mul(10).wrapping_add(digit.into());
            self.at += 1;
        }
        match self.at - start {
            0 => Digits::None,
            1..=19 => Digits::Number(value),
            _ => {
                let text = std::str::from_utf8(&self.text[start..self.at]).ok();
                text.and_then(|text| text.parse().ok()).map_or(Digits::TooLarge, Digits::Number)
            }
        }
    }

    /// Takes an identifier: a letter, then letters, digits and underscores. Empty if none comes next.
    #[inline]
    pub(super) fn identifier(&mut self) -> &'a [u8] {
        let start = self.at;
        if self.peek().is_ascii_alphabetic() {
            self.at += 1;
            while self.peek().is_ascii_alphanumeric() || self.peek() == b'_' {
                self.at += 1;
            }
        }
        &self.text[start..self.at]
    }

    /// Takes what is left of the line, with its newline, and returns it without.
    pub(super) fn line(&mut self) -> &'a [u8] {
        let rest = self.rest();
        let len = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        self.at += len + 1;
        rest[..len].strip_suffix(b"\r").unwrap_or(&rest[..len])
    }

    /// Takes the inside of a comment up to `*/` or the end of the line: true for the former. The newline is taken too.
    pub(super) fn comment(&mut self) -> bool {
        let rest = self.rest();
        for (index, byte) in rest.iter().enumerate() {
            match byte {
                b'\n' => {
                    self.at += index + 1;
                    return false;
                }
                b'*' if rest.get(index + 1) == Some(&b'/') => {
                    self.at += index + 2;
                    return true;
                }
                _ => {}
            }
        }
        self.at = self.text.len();
        false
    }
}
