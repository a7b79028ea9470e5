package pmi

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// maxCommand bounds what a rank may say at once, in bytes: MPI_Comm_spawn with many arguments says most.
const maxCommand = 256 << 10

// command is what a rank says: "cmd=put kvsname=k key=a value=b" and a newline. Values are as they came, with a backslash before what newer clients would
// have taken for an end: they take it away again from what they get.
type command struct {
	name string
	args []arg
}

type arg struct{ key, value string }

// text is the value of a key; "" if there is none.
func (c *command) text(key string) string {
	v, _ := c.lookup(key)
	return v
}

func (c *command) lookup(key string) (string, bool) {
	for _, a := range c.args {
		if a.key == key {
			return a.value, true
		}
	}
	return "", false
}

// number is the value of a key that is a number.
func (c *command) number(key string) (int, error) {
	v, ok := c.lookup(key)
	if !ok {
		return 0, fmt.Errorf("%s without %s", c.name, key)
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		return 0, fmt.Errorf("%s with %s=%.40q", c.name, key, v)
	}
	return n, nil
}

// multiple is how a command of several lines begins; its name follows.
const multiple = "mcmd="

// parse reads a command without its newline. Of a command of several lines it is the first.
func parse(line string) (*command, error) {
	name, isMultiple := strings.CutPrefix(line, multiple)
	if isMultiple {
		return &command{name: name}, nil
	}
	c := &command{}
	for rest := line; ; {
		rest = strings.TrimLeft(rest, " ")
		if rest == "" {
			break
		}
		if value, is := strings.CutPrefix(rest, "value="); is && c.name == "put" {
			c.args = append(c.args, arg{"value", value}) // older clients write spaces as they are; nothing comes behind it
			break
		}
		end := 0
		for end < len(rest) && rest[end] != ' ' {
			if rest[end] == '\\' && end+1 < len(rest) {
				end++
			}
			end++
		}
		key, value, _ := strings.Cut(rest[:end], "=")
		rest = rest[end:]
		if key == "" {
			return nil, fmt.Errorf("a value without a key: %.60q", line)
		}
		if c.name == "" {
			if key != "cmd" || value == "" {
				break
			}
			c.name = value
			continue
		}
		c.args = append(c.args, arg{key, value})
	}
	if c.name == "" {
		return nil, fmt.Errorf("no command: %.60q", line)
	}
	return c, nil
}

// read reads the next command; io.EOF is the end between two.
func read(r *bufio.Reader) (*command, error) {
	line, err := readLine(r, maxCommand)
	if err != nil {
		return nil, err
	}
	c, err := parse(line)
	if err != nil || !strings.HasPrefix(line, multiple) {
		return c, err
	}
	// MPI_Comm_spawn_multiple: as many commands follow one another, each with its own end.
	total, sofar := 1, 1
	for size := len(line); ; {
		line, err := readLine(r, maxCommand-size)
		if err != nil {
			return nil, middle(err)
		}
		size += len(line) + 1
		key, value, _ := strings.Cut(line, "=")
		switch key {
		case "totspawns":
			total, err = strconv.Atoi(value)
		case "spawnssofar":
			sofar, err = strconv.Atoi(value)
		case "endcmd":
			if sofar >= total {
				return c, nil
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s with %.60q", c.name, line)
		}
	}
}

// middle is the error of an end in the middle of a command.
func middle(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readLine reads a line of at most so many bytes, without its newline.
func readLine(r *bufio.Reader, most int) (string, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if err == nil && len(line) <= most+1 {
			return string(line[:len(line)-1]), nil
		}
		switch {
		case len(line) > most:
			return "", fmt.Errorf("more than %d bytes at once: %.60q", maxCommand, line)
		case err == bufio.ErrBufferFull:
		case err == io.EOF && len(line) > 0:
			return "", io.ErrUnexpectedEOF
		default:
			return "", err
		}
	}
}

// plain is a value for people.
func plain(value string) string {
	var b strings.Builder
	for i := 0; i < len(value); i++ {
		if value[i] == '\\' && i+1 < len(value) {
			i++
		}
		b.WriteByte(value[i])
	}
	return b.String()
}

// reply is the answer to a command: pairs of key and value.
func reply(name string, pairs ...string) []byte {
	b := append([]byte("cmd="), name...)
	for i := 0; i+1 < len(pairs); i += 2 {
		b = append(b, ' ')
		b = append(b, pairs[i]...)
		b = append(b, '=')
		b = append(b, pairs[i+1]...)
	}
	return append(b, '\n')
}

// message is a text as the value of a reply: older clients know no spaces in one.
func message(text string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r == '\\' || r == '=' || r == 0x7f {
			return '_'
		}
		return r
	}, text)
}

var errHostData = errors.New("what another host gives is no list of keys")
