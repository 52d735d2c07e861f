-- Takes or renews the leader's claim, and shows whether the store accepts writes: a refused write is the reply.
-- KEYS: leader, meta
-- ARGV: own identity, identity that may be replaced, seconds, own coordinator epoch or '' before there is one
local present = redis.call('GET', KEYS[1])
if present and present ~= ARGV[1] and present ~= ARGV[2] then
  return redis.error_reply('FENCED another coordinator leads this store: ' .. present)
end
local epoch = redis.call('HGET', KEYS[2], 'epoch')
if ARGV[4] ~= '' and epoch ~= ARGV[4] then
  return redis.error_reply('FENCED the active coordinator epoch is ' .. tostring(epoch))
end
-- Before EXPIRE, which needs no memory: after a first write, a script is no longer refused for lack of it.
local written = redis.pcall('HSET', KEYS[2], 'leader', ARGV[1])
if present == ARGV[1] then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
elseif type(written) == 'number' then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
end
if type(written) ~= 'number' then
  return written
end
return 'HELD'
